"""A client of servers with an OpenAI-compatible API: patient with what may pass, one line for the
rest.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from grpo.data.errors import UserError, blaming, shortened

# Seconds before each try and to connect.
PAUSES = (0, 1, 2, 4, 8, 16)
CONNECT = 20.0
MAY_SUCCEED_LATER = {408, 409, 425, 429}


class Server:
    """A server at the address that the user gave; its "/v1" may be left out.

    A request that may succeed later (no connection, a timeout, a status in MAY_SUCCEED_LATER, or
    500 and above) is repeated after a pause. `flag` gave the address and begins all messages. The
    `timeout` is the most seconds of a request; `limit` is the flag that sets it, or "" if none
    does, and then neither a late answer nor a status of 500 is asked for again. The key comes from
    the environment variable `key`, and is neither stored nor shown.
    """

    def __init__(self, flag: str, address: str, *, key: str, timeout: float, limit: str = ""):
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(f"{flag}{address}: give an address such as {flag}http://localhost:8000")
        if url.userinfo or url.query:
            raise UserError(f"{flag}{url.host}: give the key in {key}, not in the address")

        secret = os.environ.get(key, "").strip()
        if not (secret.isascii() and secret.isprintable()):
            raise UserError(f"{key}: has characters that no header can hold; copy the key again")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        limits = httpx.Timeout(timeout, connect=min(CONNECT, timeout))
        self.client = httpx.Client(headers=headers, timeout=limits)
        self.url = str(url.copy_with(path=url.path.rstrip("/") or "/v1"))
        self.where = f"{flag}{self.url}"
        self.key, self.limit, self.timeout = key, limit, timeout
        self.doing = "asking"

    def ask(self, path: str, body: Any = None) -> httpx.Response:
        """Return the answer to GET, or POST if there is a body: a success, or a refusal that no
        repetition would change.
        """
        method = "GET" if body is None else "POST"
        for pause in PAUSES:
            time.sleep(pause)
            try:
                response = self._whole(method, path, body)
            except httpx.ReadTimeout:
                reason = f"no answer within {self.limit}{self.timeout:g} s"
                if not self.limit:
                    raise UserError(f"{self.where}: {reason}") from None
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                status = response.status_code
                if status == 401:
                    reason = f"{reason_of(response)}; give its key in {self.key}"
                    raise UserError(f"{self.where}: {reason}")
                is_final = status < 500 or (status == 500 and not self.limit)
                if is_final and status not in MAY_SUCCEED_LATER:
                    self.doing = "asking"
                    return response
                reason = reason_of(response)
            self.doing = f"asking again ({reason})"
        raise UserError(f"{self.where}: {len(PAUSES)} tries failed; the last: {reason}")

    def _whole(self, method: str, path: str, body: Any) -> httpx.Response:
        """Return the whole response. A busy server may send spaces until it has the answer, and
        each of them restarts httpx's own timeout.
        """
        end, parts = time.monotonic() + self.timeout, []
        with self.client.stream(method, self.url + path, json=body) as response:
            for part in response.iter_bytes():
                parts.append(part)
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("")
        return httpx.Response(response.status_code, content=b"".join(parts))

    @contextmanager
    def reading(self, response: httpx.Response, whose: str) -> Iterator[None]:
        """Raise UserError if this block cannot read a `response`: it is not that of `whose`."""
        text = shortened(" ".join(response.text.split()), 120) or "it is empty"
        with blaming(f"{self.where}: the response is not that of {whose}: {text}"):
            yield


def reason_of(response: httpx.Response) -> str:
    """Return the status of a refusal and its text, on one line."""
    text = shortened(" ".join(response.text.split()), 300)
    return f"status {response.status_code}: {text or 'no reason given'}"
