"""Does a run in which something failed pass for a measurement?"""

from __future__ import annotations

import json

import pytest

from loadtest.rig import answered


@pytest.mark.parametrize(("done", "errors"), [(9, 0), (10, 1)])
def test_a_request_that_failed_or_never_ended_is_an_error(done: int, errors: int) -> None:
    """With all that the generator saw."""
    with pytest.raises(RuntimeError, match=r"2K warm: .*'done'"):
        answered("2K warm", json.dumps({"done": done, "errs": errors}), 10)


def test_otherwise_it_is_what_the_generator_saw() -> None:
    """Unchanged."""
    assert answered("2K warm", '{"done": 10, "errs": 0, "p50": 1.5}', 10)["p50"] == 1.5
