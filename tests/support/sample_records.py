"""Valid records of every kind of file, for tests that damage them."""

PROBLEM = {
    "task": "interleave",
    "level": 1,
    "prompt": "A: a\nB: b",
    "target": "a b",
    "key": "k",
    "data": {"a": ["a"], "b": ["b"]},
}
GROUP = {
    "step": 1,
    "index": 0,
    "attempt": 0,
    "temperature": 1.0,
    "problem": PROBLEM,
    "prompt_tokens": [1, 2],
    "class": "varied",
    "action": "keep",
    "trap": None,
    "completions": [
        {
            "text": "a",
            "tokens": [1],
            "logprobs": [-0.1],
            "finish": "stop",
            "reward": 0.5,
            "value": 0.5,
            "exact": False,
            "parts": {},
            "advantage": 0.1,
        }
    ],
}
MANIFEST = {
    "step": 1,
    "reason": "",
    "files": {"a.json": "0" * 64},
}
