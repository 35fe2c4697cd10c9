"""Applies what was learnt about pods and links to the fleet, and shares it between routers.

Once a second the fleet gets the current coefficients. With a Redis, every few seconds each served model's coefficients
are exchanged with the other routers, so that a new router starts with what the others learnt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from router.fleet.fleet import Fleet
from router.observe.calibrator import Calibrator
from router.policy.calibration import Calibration, class_key, model_of
from router.types import Link, Links, Pod

if TYPE_CHECKING:
    from router.stores.shared_state import SharedCalibration

APPLY_S = 1.0
EXCHANGE_S = 5.0


class CalibrationFeed:
    """Applies and shares one calibration. `configured` returns the pods with the speeds of their priors; `shared`
    returns the exchange of one model."""

    def __init__(
        self,
        fleet: Fleet,
        calibrator: Calibrator,
        configured: Callable[[], Iterable[Pod]],
        shared: Callable[[str], SharedCalibration] | None = None,
    ) -> None:
        self._fleet = fleet
        self._calibrator = calibrator
        self._configured = configured
        self._shared = shared
        self._exchanges: dict[str, SharedCalibration] = {}

    @property
    def runs(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """The loops to run, by name."""
        return {"calibration": self.apply_forever} | ({"shared calibration": self.share} if self._shared else {})

    async def apply_forever(self) -> None:
        """Applies until cancelled."""
        while True:
            self.apply()
            await asyncio.sleep(APPLY_S)

    async def share(self) -> None:
        """Exchanges until cancelled."""
        from router.feeds.backoff import Backoff  # imports redis, which a router without a cluster does not need

        backoff = Backoff("shared calibration")
        while True:
            if await backoff.attempt(self._exchange):
                await asyncio.sleep(EXCHANGE_S if self._exchanges else APPLY_S)

    async def _exchange(self) -> None:
        assert self._shared is not None
        for model in sorted({model_of(status.pod) for status in self._fleet.snapshot.pods} - {""}):
            exchange = self._exchanges.get(model)
            if exchange is None:
                exchange = self._exchanges[model] = self._shared(model)
            await exchange.exchange(self._calibrator.calibration)

    def apply(self) -> None:
        """Give the fleet the current speeds and links."""
        calibration, priors = self._calibrator.calibration, {pod.id: pod.speed for pod in self._configured()}
        self._calibrator.priors = priors
        speeds = {
            status.pod.id: calibration.speed(class_key(status.pod), status.pod.id, priors[status.pod.id])
            for status in self._fleet.snapshot.pods
            if status.pod.id in priors
        }
        self._fleet.calibrate(speeds, calibrated_links(calibration, self._calibrator.links))


def calibrated_links(calibration: Calibration, configured: Links) -> Links:
    """The links with their current coefficients."""
    known: dict[str, Link] = {}
    for place in fields(configured):
        link: Link | None = getattr(configured, place.name)
        if link is not None:
            known[place.name] = calibration.link(link.kind, link)
    return Links(**known)
