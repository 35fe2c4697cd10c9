"""How much is kept of decisions, and which policy decides beside the live one?

Two parts of `config/router.yaml` as frozen models. This file never opens a file.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, NonNegativeInt

from router.config.load import Strict


class Receipts(Strict):
    """What stays of requests: neither prompts nor answers, unless `prompts` says so."""

    keep: NonNegativeInt = 1000
    """The last decisions in memory, for `warmroute explain`: 7 KiB each with 10 pods, 13 with 100, 37 with 500."""
    file: str | None = None
    """One line of JSON a request is appended to it."""
    redis_maxlen: NonNegativeInt = 0
    """Above 0, the same lines go to a stream of `index.redis`, which keeps about so many."""
    replay_data: bool = True
    """With the lines, what `warmroute replay` needs to decide again."""
    prompts: bool = False
    """With all of it, the prompts."""


def _file_alone(value: Any) -> Any:
    """`receipts: FILE` is short for `receipts: {file: FILE}`."""
    return {"file": value} if value is None or isinstance(value, str) else value


ReceiptsOrFile = Annotated[Receipts, BeforeValidator(_file_alone)]
