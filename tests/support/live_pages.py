"""The server of a live page, for tests."""

import http.client
import threading
from contextlib import contextmanager

from grpo.tools.report.live import LiveServer


@contextmanager
def serving(*runs):
    """Serve the page of runs as long as this block lasts."""
    with LiveServer(runs, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="", method="GET", host=None, token=None):
    """Return the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    headers = {"Host": host} if host is not None else {}
    address = f"/{server.token if token is None else token}/{path}"
    connection.request(method, address, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), body
