"""The one line by which a user's mistake is refused."""

import pytest

from grpo.data.errors import UserError


def refused(function, *arguments, **options) -> str:
    """Return what a call raises as a UserError, which is one line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line
