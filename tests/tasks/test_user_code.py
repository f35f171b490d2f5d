"""Fingerprints of functions: they follow the code, and nothing else."""

import functools

from tasks.user_code import function_digest


def weighted(weight):
    def reward(completion):
        return weight * len(completion)

    return reward


def doubled(function):
    @functools.wraps(function)
    def reward(completion):
        return 2 * function(completion)

    return reward


class Judge:
    def __call__(self, completion):
        return 1.0

    def method(self, completion):
        return 0.5


class Other:
    def __call__(self, completion):
        return 0.0


def reward(completion, most=3):
    return min(len(completion), most)


ONE = reward
digest = function_digest


def reward(completion, most=3):  # noqa: F811
    """Lay the same out in another way."""
    return min(len(completion), most)


DOCUMENTED = reward


def reward(completion,
           most=3):  # fmt: skip # noqa: F811
    return min(len(completion),    most)  # fmt: skip


LAID_OUT = reward


def reward(completion, most=4):  # noqa: F811
    return min(len(completion), most)


@doubled
def decorated(completion):
    return 1.0


def plain(completion):
    return 1.0


def test_layout_and_comments_do_not_count_and_code_and_defaults_do():
    assert digest(ONE) == digest(LAID_OUT)
    assert len({digest(ONE), digest(DOCUMENTED), digest(reward)}) == 3


def test_a_lambda_is_found_in_the_middle_of_a_call():
    one, same, other = [
        dict(a=1, b=lambda x: x + 1)["b"],
        (3, lambda x: x + 1)[1],  # fmt: skip
        dict(b=lambda x: x + 2)["b"],
    ]
    assert digest(one) == digest(same) != digest(other)


def test_values_of_enclosing_functions_and_partial_arguments_count():
    assert digest(weighted(2)) == digest(weighted(2)) != digest(weighted(3))
    assert digest(weighted([])) == digest(weighted([1]))  # a list may have grown since
    two, three = (functools.partial(reward, most=most) for most in (2, 3))
    assert digest(two) == digest(functools.partial(reward, most=2)) != digest(three)
    assert digest(two) != digest(reward)


def test_decorators_methods_and_objects():
    assert digest(decorated) != digest(plain)
    assert digest(Judge()) == digest(Judge()) != digest(Other())
    assert digest(Judge().method) not in (digest(Judge()), digest(Other()))


def test_without_source_code_the_name_counts():
    made: dict = {}
    exec("def one(x): return x\ndef two(x): return x", made)
    assert digest(made["one"]) == digest(made["one"]) != digest(made["two"])
    assert digest(len) == digest(len) != digest(sum)
