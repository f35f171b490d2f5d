"""Upload a folder to the Hugging Face hub, and say in one line why it fails.

The token is read by huggingface_hub: from HF_TOKEN, or from the file that `hf auth login` wrote. It
is not stored here and not shown.
"""

from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from data.errors import UserError
from data.text import shortened

# What a status means here.
MEANINGS = {
    401: "the hub does not know the token; make a new one and log in again with: hf auth login",
    403: "the token may not write there; it needs the permission to write to this repository",
    404: "the hub has no such owner, or the token may not see it",
    429: "the hub refuses more requests for now; try again later",
}


def check_push(repo: str) -> None:
    """Raise UserError unless `repo` is a name such as "me/model" and there is a token."""
    try:
        validate_repo_id(repo)
    except HFValidationError:
        is_valid = False
    else:
        is_valid = repo.count("/") == 1
    if not is_valid:
        raise UserError(f"--push {repo}: give OWNER/NAME, such as me/interleave-25")
    if get_token() is None:
        raise UserError(
            f"--push {repo}: there is no token of the Hugging Face hub; log in with: hf auth "
            "login, or set HF_TOKEN"
        )


def push(folder: Path, repo: str, *, is_public: bool, message: str) -> str:
    """Upload `folder` to the repository `repo`, made if there is none; return its address.

    A new repository is private unless `is_public`; one that exists stays as it is. Raises UserError
    if the hub refuses, or cannot be reached.
    """
    api = HfApi()
    try:
        made = api.create_repo(repo, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = MEANINGS.get(status) or f"the hub says: {_first_line(error)}"
        raise UserError(f"--push {repo}: status {status}: {said}") from error
    except (httpx.HTTPError, OSError, RuntimeError) as error:
        # hf_xet, which uploads large files, reports its failures as OSError and RuntimeError.
        raise UserError(
            f"--push {repo}: the hub could not be reached: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error
    return str(made)


def _first_line(error: Exception) -> str:
    """Return the beginning of an error's text, without the token should it be there."""
    text = str(getattr(error, "server_message", None) or error).strip()
    line = text.splitlines()[0] if text else "nothing was said"
    token = get_token()
    return shortened(line.replace(token, "***") if token else line, 200)
