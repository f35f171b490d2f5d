"""The cache of a rollout: rows that are copied, dropped, shortened and put in any order."""

import torch
from tiny_models import PROMPTS


def test_rows_in_any_order_are_rows_alone(tiny_policy):
    """Rows of prompts of several lengths, that diverge, grow unevenly and end."""
    forward = tiny_policy.forward
    prompts = [tiny_policy.encode(prompt) for prompt in PROMPTS]
    _, cache = forward.prefill(prompts, room=16)
    written = [list(prompt) for prompt in prompts]

    for rows, dropped in (
        ([0, 1, 2], [0, 0, 0]),
        ([2, 0, 0, 1, 1], [1, 0, 2, 0, 3]),  # of the three new tokens of each
        ([4, 0, 2], [2, 0, 1]),
    ):
        written = [written[row][: len(written[row]) - drop] for row, drop in zip(rows, dropped)]
        cache.reorder(torch.tensor(rows), torch.tensor([len(tokens) for tokens in written]))
        new = torch.arange(3 * len(rows)).view(-1, 3) + 5
        hidden = forward.extend(new, cache)
        written = [tokens + row.tolist() for tokens, row in zip(written, new)]

        for tokens, found in zip(written, hidden):
            _, alone = forward.prefill([tuple(tokens[:-3])], room=3)
            expected = forward.extend(torch.tensor([tokens[-3:]]), alone)[0]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
