"""A Hugging Face hub on this machine, for tests of uploads: what it gets, and how it refuses."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """What the hub was told.

    `files` are the uploaded ones by repository and name, `created` says of each new repository
    whether it is private, `tokens` are the tokens that were sent. `refusals` has a status for a
    word in the path of a request: {"create": 403}.
    """

    def __init__(self, refusals):
        self.refusals = refusals
        self.files, self.created, self.tokens, self.messages = {}, {}, set(), []

    def commit(self, repo, lines):
        """Keep the message and the files of a commit."""
        for line in lines:
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                content = base64.b64decode(line["value"]["content"])
                self.files.setdefault(repo, {})[line["value"]["path"]] = content


@contextmanager
def fake_hub(monkeypatch, token="hf_secret", refusals=()):
    """Serve a hub which huggingface_hub then takes for the real one; yield its `Hub`."""
    hub = Hub(dict(refusals))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802  (the name is given)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.tokens.add(self.headers.get("Authorization"))
            status = next((code for word, code in hub.refusals.items() if word in self.path), None)
            if status:
                return self.answer(status, {"error": f"no, {self.headers['Authorization']}"})
            repo = self.path.removeprefix("/api/models/").rsplit("/", 2)[0]
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                # Older versions of huggingface_hub send "private".
                is_private = asked.get("visibility") == "private" or asked.get("private")
                hub.created[name] = bool(is_private)
                return self.answer(200, {"url": f"{address}/{name}"})
            if self.path == "/api/validate-yaml":
                return self.answer(200, {"errors": [], "warnings": []})
            if "/preupload/" in self.path:
                files = json.loads(body)["files"]
                modes = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in files
                ]
                return self.answer(200, {"files": modes})
            hub.commit(repo, map(json.loads, body.splitlines()))
            commit = {"commitUrl": f"{address}/{repo}/commit/1", "commitOid": "1", "hookOutput": ""}
            return self.answer(200, {"success": True, **commit})

        def do_GET(self):  # noqa: N802
            self.answer(404, {"error": "not here"})

        def answer(self, status, body):
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", token)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
