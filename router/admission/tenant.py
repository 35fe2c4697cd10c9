"""Who sends a request, as far as its place in the queue depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, NonNegativeFloat

MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request meets: time to first token, and mean time per token after it.

    The first token may take `ttft_ms` or `idle_prefills` times the prompt's prefill on an idle pod without a cache,
    whichever is more."""

    ttft_ms: NonNegativeFloat = math.inf
    tpot_ms: NonNegativeFloat = math.inf
    idle_prefills: NonNegativeFloat = 0.0
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def ttft_limit_ms(self, idle_prefill_ms: float) -> float:
        """The limit of a prompt whose prefill takes so long on an idle pod."""
        return max(self.ttft_ms, self.idle_prefills * idle_prefill_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant of the queue. Of the tenants of one priority band, each gets its `weight` of the prefill time.

    A higher `band` goes first."""

    name: str = ""
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)] = 1.0
    band: int = 0
    slo: Slo = Slo()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


OPEN_TENANT = Tenant()
"""Every request's tenant where no tenants are configured."""
