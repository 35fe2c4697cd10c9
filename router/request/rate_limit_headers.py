"""The headers in which OpenAI's and Anthropic's APIs report limits of a tenant.

OpenAI has one limit of tokens: the one with the smaller part left is reported, of uncached prompt tokens and of output
tokens. Times until a limit is whole again are durations there, and times of day in Anthropic's API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple, TypeAlias

from router.admission.meter import Meter
from router.admission.quotas import Applied
from router.admission.windows import KEPT_S
from router.apis.api import Conventions
from router.endpoints import Endpoint
from router.request.inbound import HeaderList


class LimitLine(NamedTuple):
    """One limit, and the names of its headers."""

    meter: Meter
    limit: tuple[bytes, bytes]
    remaining: bytes
    reset: bytes


Lines: TypeAlias = Sequence[Sequence[LimitLine]]
"""The limits that may be reported under each name that an API has for limits."""


def limit_headers(endpoint: Endpoint, applied: Applied, now_s: float, unix_s: float) -> HeaderList:
    """The limits of a request that was just counted, so that they are whole again when it leaves the window. `now_s`:
    of the clock of the meters; `unix_s`: the same time of day."""
    conventions = endpoint.api.conventions
    reset = _timestamp(ceil(unix_s) + KEPT_S) if conventions.resets_at_time else _WHOLE_WINDOW
    return _headers(_lines(applied, conventions), int(now_s), reset)


def refusal_headers(endpoint: Endpoint, applied: Applied, now_s: float, unix_s: float) -> HeaderList:
    """The limits of a request that was refused."""

    def reset_of(meter: Meter) -> bytes:
        reset_s = meter.reset_s(now_s)
        return _timestamp(ceil(unix_s + reset_s)) if conventions.resets_at_time else _duration(reset_s)

    conventions = endpoint.api.conventions
    return _headers(_lines(applied, conventions), int(now_s), b"", reset_of)


def _headers(groups: Lines, second: int, reset: bytes, reset_of: Callable[[Meter], bytes] | None = None) -> HeaderList:
    """Headers of the limit of each group that has the smallest part left. `reset` applies to all limits without
    `reset_of`."""
    found: HeaderList = []
    for group in groups:
        least = inf
        for line in group:
            meter = line[0]
            others = meter.others
            left = meter.limit - meter.own.total - (others.total and others.at(second))
            if (part := left / meter.limit) < least:
                least, least_left, tightest = part, left, line
        meter, limit, remaining, reset_name = tightest
        remaining_value = b"%d" % least_left if least_left > 0 else b"0"
        found += limit, (remaining, remaining_value), (reset_name, reset if reset_of is None else reset_of(meter))
    return found


def _lines(applied: Applied, conventions: Conventions) -> Lines:
    """Built once for each tenant, model and provider's conventions."""
    known: Lines | None = applied.header_lines.get(conventions)
    if known is None:
        named = ((of, getattr(applied, meters)) for of, meters in conventions.limits.items())
        known = applied.header_lines[conventions] = [
            [_line(meter, *conventions.limit_headers(of)) for meter in meters] for of, meters in named if meters
        ]
    return known


def _line(meter: Meter, limit: bytes, remaining: bytes, reset: bytes) -> LimitLine:
    return LimitLine(meter, (limit, b"%d" % meter.limit), remaining, reset)


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: `6m0s`, `1.5s`, `0s`."""
    minutes, rest = divmod(ceil(seconds * 1000) / 1000, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{int(minutes)}m{text}" if minutes else text).encode()


_WHOLE_WINDOW = _duration(KEPT_S)


@lru_cache(4)
def _timestamp(unix_s: int) -> bytes:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
