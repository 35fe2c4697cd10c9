"""A generator run with failures is not a measurement."""

from __future__ import annotations

import json

import pytest

from loadtest.bench.rig import check_stats


@pytest.mark.parametrize(("done", "errors"), [(9, 0), (10, 1)])
def test_a_failed_or_unfinished_request_is_an_error(done: int, errors: int) -> None:
    """The message has the generator's output."""
    with pytest.raises(RuntimeError, match=r"2K warm: .*'done'"):
        check_stats("2K warm", json.dumps({"done": done, "errs": errors}), 10)


def test_a_complete_run_returns_the_generators_output() -> None:
    assert check_stats("2K warm", '{"done": 10, "errs": 0, "p50": 1.5}', 10)["p50"] == 1.5
