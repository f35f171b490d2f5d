"""Serve the report of runs in progress on this machine: `python -m grpo.report --live runs/NAME`.

The server only reads. It listens on 127.0.0.1, and its address holds a random token, so that
neither another machine nor another user of this one can read a run. A page of a web site cannot
either: requests for another host, which DNS rebinding sends, are refused. `/TOKEN/` is the page,
`/TOKEN/data` what is new in the runs, `/TOKEN/samples` a step, and `/TOKEN/search` the matches of a
search.
"""

import hmac
import json
import re
import secrets
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from data.errors import UserError
from data.text import escape_control, printable
from grpo.run.logs import load_run
from grpo.tools.report.page import assembled, described, packed_step
from grpo.tools.report.samples import pieces_of, search

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")

# The logs whose change makes a new version of the page.
LOGS = ("config.yaml", "metrics.jsonl", "eval.jsonl", "curriculum.jsonl")

# Seconds after which a client that sends nothing is left.
TIMEOUT = 30

# The place of a run, or a step.
NUMBER = re.compile("[0-9]{1,9}")

# The characters of a query. The page's field takes fewer, but a letter may become several in lower
# case.
MAX_QUERY = 1000


def serve(folders: Sequence[Path], port: int) -> NoReturn:
    """Serve the page of the runs until Ctrl-C.

    Raises UserError if a folder is not that of a run, or if the port cannot be used.
    """
    with LiveServer(folders, port) as server:
        print(printable(f"{server.url}  follows the run; Ctrl-C ends"), flush=True)
        server.serve_forever()
    raise AssertionError("serve_forever ends by an exception alone")


class LiveServer(ThreadingHTTPServer):
    """The server of a page; `url` is its address with the token."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int):
        self.folders = list(folders)
        for folder in folders:
            load_run(folder)  # raises UserError if it is not a run
        self.token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._search_lock = threading.Lock()
        self._version = ""
        self._descriptions: list[dict[str, Any]] = []
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"--port {port}: cannot be used ({reason}); give another") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left; print the traceback of any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def page(self) -> str:
        """Return the page, without completions, which it asks for step by step."""
        _, descriptions = self.described()
        return assembled(descriptions, ["{}"] * len(descriptions), is_live=True)

    def described(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the version and the content of the runs' files, read again if they changed."""
        with self._lock:
            version = "-".join(_version(folder) for folder in self.folders)
            if version != self._version:
                runs = [load_run(folder) for folder in self.folders]
                self._descriptions = [described(run, run.steps()) for run in runs]
                self._version = version
            return self._version, self._descriptions

    def samples(self, number: int, step: int) -> str:
        """Return the groups of a step of a run as JSON."""
        run = load_run(self.folders[number])
        return packed_step(run.groups(step), run.config, pieces_of(run.path))

    def search(self, number: int, query: str, after: int, until: int) -> str:
        """Return matches in a run as JSON, see `grpo.tools.report.samples.search`.

        One search runs at a time, so that many of them cannot take the cores from the training.
        """
        with self._search_lock:
            return json.dumps(search(load_run(self.folders[number]), query, after, until))


class Handler(BaseHTTPRequestHandler):
    """Answers one client."""

    server: LiveServer
    timeout = TIMEOUT
    protocol_version = "HTTP/1.1"
    server_version = "grpo"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, with what is new, with completions, or with matches."""
        try:
            parts = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "not an address\n")
            return
        token, _, name = parts.path.removeprefix("/").partition("/")
        if not self._is_allowed(token):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "forbidden\n")
            return

        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            self._answer(name, query)
        except UserError as error:
            answer = json.dumps({"error": escape_control(str(error))})
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "application/json", answer)

    def _answer(self, name: str, query: dict[str, str]) -> None:
        """Send what the path `name` below the token stands for."""
        if name == "":
            self._send(HTTPStatus.OK, "text/html", self.server.page())
        elif name == "data":
            version, descriptions = self.server.described()
            is_known = query.get("since") == version
            new = {} if is_known else {"runs": descriptions}
            answer = json.dumps({"version": version, **new})
            self._send(HTTPStatus.OK, "application/json", answer)
        elif found := self._found(name, query):
            self._send(HTTPStatus.OK, "application/json", found)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found\n")

    def _found(self, name: str, query: dict[str, str]) -> str | None:
        """Return the completions or the matches that are asked for; None if none are."""
        numbers = {key: int(text) for key, text in query.items() if NUMBER.fullmatch(text)}
        number = numbers.get("run", -1)
        if not 0 <= number < len(self.server.folders):
            return None

        if name == "samples" and "step" in numbers:
            return self.server.samples(number, numbers["step"])
        text = query.get("query", "")
        if name == "search" and {"after", "until"} <= numbers.keys() and 0 < len(text) <= MAX_QUERY:
            return self.server.search(number, text, numbers["after"], numbers["until"])
        return None

    def _is_allowed(self, token: str) -> bool:
        """Return whether a request has the token and is meant for this machine.

        The port of the Host header may be another one: that of the near end of an ssh tunnel.
        """
        host = self.headers.get("Host", "").rpartition(":")
        name = host[0] or host[2]
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        return is_known and name in HOSTS

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a request holds the token."""


def _version(folder: Path) -> str:
    """Return what changes whenever a run writes a line."""
    stats = [path.stat() for path in map(folder.joinpath, LOGS) if path.exists()]
    return ".".join(f"{stat.st_mtime_ns}.{stat.st_size}" for stat in stats)
