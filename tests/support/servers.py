"""Servers on this machine, for tests of what asks them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.torch import load_file

from grpo.model.load import load_policy
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key, truncation

# A function of a request's body, with its path, and its number (from 1) that returns status,
# headers and body.
Behaviour = Callable[[dict, int], tuple[int, dict[str, str], object]]


class Log:
    """The requests to a server: their bodies and headers, and how many ran at once at most."""

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # beyond it a connection is tried again after a second


@contextmanager
def serving(behave: Behaviour):
    """Serve on a free port of this machine; yield (address, Log)."""
    log = Log()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802  (the base class calls this name)
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            body["path"] = self.path
            with log.lock:
                log.bodies.append(body)
                log.headers.append(dict(self.headers))
                number = len(log.bodies)
                log.at_once += 1
                log.most_at_once = max(log.most_at_once, log.at_once)

            try:
                status, headers, answer = behave(body, number)
                content = answer
                if not isinstance(answer, bytes | Iterator):  # of parts, one after the other
                    content = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if isinstance(content, bytes):
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                for part in [content] if isinstance(content, bytes) else content:
                    self.wfile.write(part)
            except OSError:  # the client has left
                pass
            finally:
                with log.lock:
                    log.at_once -= 1

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", log
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def vllm(model, context=1024):
    """Return the behaviour of a vLLM server of a model, which samples by our own decoder.

    All else is as by vLLM 0.32 on a CPU, which was tried.
    """
    base = load_policy(str(model), device="cpu")
    served, lock = {"base": base}, threading.Lock()

    def behave(body, number):
        match body["path"]:
            case "/v1/models":
                served_model = {"id": "base", "parent": None, "max_model_len": context}
                return 200, {}, {"data": [{"id": "old", "parent": "base"}, served_model]}
            case "/v1/completions":
                if body["n"] > 1 and body["temperature"] == 0:
                    return 400, {}, b"n must be 1 when using greedy sampling"
                if body["seed"] is not None:  # if it prefills a prompt in parts
                    return 500, {}, b"CPU Generator does not use offset"
                body["max_tokens"] = min(body["max_tokens"], context - len(body["prompt"]))
                with lock:
                    return 200, {}, {"choices": sample(served[body["model"]], body, number)}
            case "/v1/load_lora_adapter":
                adapter = Path(body["lora_path"])
                served[body["lora_name"]] = load_policy(str(model), device="cpu", weights=adapter)
            case "/v1/unload_lora_adapter":
                del served[body["lora_name"]]
            case "/collective_rpc":
                weights = load_file(Path(body["kwargs"]["weights_path"], "model.safetensors"))
                base.model.load_state_dict(weights, strict=False)
                return 200, {}, {"results": [None]}
            case "/reset_prefix_cache":
                return 200, {}, {"success": True}
        return 200, {}, b"Success"

    return behave


def sample(policy, body, seed):
    """Return the choices of a completion."""
    if only := body.get("allowed_token_ids"):
        return [completion(only, [0.0])]
    keys = [[sample_key(seed, n) for n in range(body["n"])]]
    given = [tuple(body["prompt"])], keys, body["temperature"], [body["max_tokens"]]
    (group,) = generate(policy, RolloutRequest(*given, truncation(body["top_p"])))
    return [completion(one.tokens, one.logprobs, one.finish) for one in group]


def completion(tokens, logprobs, finish="length"):
    """Return one of the choices of an answer, as vLLM writes it."""
    found = {"token_logprobs": list(logprobs)}
    return {"text": "", "token_ids": list(tokens), "logprobs": found, "finish_reason": finish}
