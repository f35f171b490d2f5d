"""A server of chat completions for tests, whose behaviour is a function."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# A function of a request's body and its number (from 1) that returns status, headers and body.
Behaviour = Callable[[dict, int], tuple[int, dict[str, str], object]]


def chat(text, finish="stop", tokens=(11, 7)):
    """Return the body of a response with one answer."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]},
    }


class Log:
    """The requests to a server: their bodies and headers, and how many ran at once at most."""

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()


@contextmanager
def serving(behave: Behaviour):
    """Serve on a free port of this machine; yield (address, Log)."""
    log = Log()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802  (the base class calls this name)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with log.lock:
                log.bodies.append(body)
                log.headers.append(dict(self.headers))
                number = len(log.bodies)
                log.at_once += 1
                log.most_at_once = max(log.most_at_once, log.at_once)

            try:
                status, headers, answer = behave(body, number)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the client has left
                pass
            finally:
                with log.lock:
                    log.at_once -= 1

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", log
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
