"""The headers in which OpenAI's and Anthropic's APIs report limits of a tenant.

OpenAI has one limit of tokens: the one with the smaller part left is reported, of uncached prompt tokens and of output
tokens. Times until a limit is whole again are durations there, and times of day in Anthropic's API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import ceil

from router.admission.meter import Meter
from router.admission.quotas import Applied, Standing, standing
from router.endpoints import Endpoint
from router.proxy.headers import HeaderList

_ANTHROPIC = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS})


def rate_limit_headers(endpoint: Endpoint, applied: Applied, now_s: float, unix_s: float) -> HeaderList:
    """The limits that apply to a request. `now_s`: of the clock of the meters; `unix_s`: the same time of day."""
    if endpoint in _ANTHROPIC:
        return _headers(
            ((b"requests", applied.requests), (b"input-tokens", applied.prompt), (b"output-tokens", applied.output)),
            lambda name, value: b"anthropic-ratelimit-%b-%b" % (name, value),
            lambda reset_s: _timestamp(unix_s + reset_s),
            now_s,
        )
    return _headers(
        ((b"requests", applied.requests), (b"tokens", applied.tokens)),
        lambda name, value: b"x-ratelimit-%b-%b" % (value, name),
        _duration,
        now_s,
    )


def _headers(
    limits: Sequence[tuple[bytes, Sequence[Meter]]],
    header: Callable[[bytes, bytes], bytes],
    reset: Callable[[float], bytes],
    now_s: float,
) -> HeaderList:
    found: HeaderList = []
    for name, meters in limits:
        now: Standing | None = standing(meters, now_s)
        if now is not None:
            found += (
                (header(name, b"limit"), b"%d" % now.limit),
                (header(name, b"remaining"), b"%d" % now.remaining),
                (header(name, b"reset"), reset(now.reset_s)),
            )
    return found


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: `6m0s`, `1.5s`, `0s`."""
    minutes, rest = divmod(ceil(seconds * 1000) / 1000, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{int(minutes)}m{text}" if minutes else text).encode()


def _timestamp(unix_s: float) -> bytes:
    return datetime.fromtimestamp(ceil(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
