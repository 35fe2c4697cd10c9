"""What may a request cost, and how long is anybody waited for?

The part `limits` of `config/router.yaml` as a frozen model. This file enforces nothing.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from router.config.load import Strict


class Limits(Strict):
    """What one request may cost before it is refused or given up."""

    max_body_bytes: PositiveInt = 32 * 1024 * 1024
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    """Request line and headers."""
    max_connections: PositiveInt = 16_384
    """Of clients; each needs a file descriptor, and another one while it is served."""
    max_in_flight: PositiveInt = 8_192
    """Requests being served; more are told to come back later."""
    max_held_bytes: PositiveInt = 1024 * 1024 * 1024
    """Of all bodies that come in or wait for their answers to begin; a request beyond is told to come back later."""
    request_timeout_s: PositiveFloat = 60.0
    """How long a request may take to arrive, first byte to last."""
    write_timeout_s: PositiveFloat = 60.0
    """How long a client may take nothing of what is held for it."""
    connect_timeout_s: PositiveFloat = 2.0
    first_byte_timeout_s: PositiveFloat = 600.0
    idle_timeout_s: PositiveFloat = 300.0
    """Longest silence inside an answer."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How many further candidates may be tried before the first byte."""
    retry_budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of the last minute's requests that may be tried again, beside 20 a minute; failed connections are free."""
    drain_delay_s: NonNegativeFloat = 2.0
    """On SIGTERM: how long /readyz says no before connections are refused, so that load balancers notice first."""
    drain_timeout_s: NonNegativeFloat = 60.0
    """On SIGTERM: how long running answers may take to finish."""
