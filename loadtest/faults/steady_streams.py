"""Sends streams at a constant rate, and counts the answers that fail, are cut, or differ from others to the same
request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from loadtest.traffic.load_driver import LoadDriver, RequestResult
from router.types import Endpoint

SHOWN = 5
"""Errors that are shown."""

Asked: TypeAlias = Callable[[int], tuple[Endpoint, dict[str, Any], str]]
"""The request of a number: its endpoint, its body, and its kind. All answers to a kind must be equal."""


@dataclass(frozen=True, slots=True)
class Answers:
    """`failed`: before the first token; `cut`: after it; `changed`: whole, but not as others of the same kind."""

    answers: int
    failed: int
    cut: int
    changed: int
    e2e_max_s: float
    errors: list[str] = field(default_factory=list)

    @property
    def all_whole(self) -> bool:
        return not (self.failed or self.cut or self.changed)


async def send_steadily(driver: LoadDriver, per_s: float, asked: Asked) -> None:
    """Send until cancelled; then wait for the answers."""
    async with asyncio.TaskGroup() as group:
        try:
            for number in count():
                await driver.until(number / per_s)
                endpoint, body, kind = asked(number)
                group.create_task(driver.send(endpoint, body, kind, number / per_s))
        except asyncio.CancelledError:
            return


def counted(served: Sequence[RequestResult], tokens: int, texts: dict[str, str], logs: Sequence[Path]) -> Answers:
    """`texts`: the answer to each kind, filled in where it is missing. `logs`: of the routers; an error is shown with
    their lines about the request."""
    whole, broken = [one for one in served if not one.error], [one for one in served if one.error]
    for one in whole:
        texts.setdefault(one.kind, one.text)
    return Answers(
        answers=len(served),
        failed=sum(one.ttft_s is None for one in broken),
        cut=sum(one.ttft_s is not None for one in broken),
        changed=sum(one.text != texts[one.kind] or one.output_tokens != tokens for one in whole),
        e2e_max_s=round(max((one.e2e_s for one in served), default=0.0), 1),
        errors=[f"{one.due_s:.1f} s: {one.error}; {_logged(one.id, logs)}" for one in broken[:SHOWN]],
    )


def continuations(metrics: str) -> Counter[str]:
    """What a router has counted, by labels."""
    lines = [line for line in metrics.splitlines() if line.startswith("warmroute_continuations_total{")]
    found = [line.removeprefix("warmroute_continuations_total").rsplit(" ", 1) for line in lines]
    return Counter({labels: int(float(value)) for labels, value in found if float(value)})


def _logged(request_id: str, logs: Sequence[Path]) -> str:
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()] if request_id else []
    return " ".join(line for line in lines if request_id in line)
