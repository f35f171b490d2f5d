"""Links in the documents lead to files and headings that exist."""

import re
from pathlib import Path

from grpo.config import ON_RESUME
from grpo.run.resume import FREE_OPTIONS
from grpo.variance import EQUAL

TOP = Path(__file__).resolve().parent.parent
PAGES = [
    *(TOP / name for name in ("README.md", "CONTRIBUTING.md")),
    *(TOP / "runs" / name for name in ("decisions.md", "archive/LOG.md")),
    TOP / "tests" / "support" / "architectures.md",
    *sorted((TOP / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def broken_links(page: Path) -> list[str]:
    found = []
    for groups in LINK.findall(page.read_text()):
        link = "".join(groups)
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or anchor and anchor not in anchors_of(target):
            found.append(link)
    return found


def test_links_lead_somewhere():
    assert {page.name: broken for page in PAGES if (broken := broken_links(page))} == {}


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[x](#a-title) [y](#other) [z](gone.md) [w](https://example.org)\n")
    assert broken_links(page) == ["#other", "gone.md"]


def lines(name: str) -> list[str]:
    return (TOP / name).read_text().splitlines()


def test_documents_stay_short():
    assert len(lines("README.md")) <= 200 and len(lines("CHANGELOG.md")) <= 60
    assert len(list((TOP / "docs").glob("*.md"))) <= 10
    rows = [line for line in lines("runs/decisions.md") if line.startswith("| ")]
    assert len(rows) <= 64  # 60, and the heads of four tables


def test_the_guarantees_name_tests_that_exist():
    text = (TOP / "docs" / "performance.md").read_text().partition("## Guarantees")[2]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(named) > 20
    assert [name for name in named if not (TOP / "tests" / name).exists()] == []


def test_what_a_resume_can_change_is_listed():
    text = (TOP / "docs" / "run-files.md").read_text().partition("Only `steps`")[2]
    listed = f"`steps`{text.partition('can')[0]}"
    assert {*re.findall(r"`(?:--)?([\w-]+)`", listed)} == {*ON_RESUME, *FREE_OPTIONS}


def test_the_least_difference_of_rewards_is_that_of_the_monitor():
    said = re.search(r"at most (\S+) of the largest", (TOP / "docs/failing-run.md").read_text())
    assert float(said[1]) == EQUAL
