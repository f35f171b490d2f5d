"""Chromium, for the tests that drive a page."""

import shutil

import pytest

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --window-size=1280,900"
).split()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, without a window."""
    webdriver = pytest.importorskip(
        "selenium.webdriver",
        reason="selenium is not installed: pip install -c constraints.txt -e '.[browser]'",
    )
    program, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    if not program or not driver:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    window.get("about:blank")
    yield window
    window.quit()
