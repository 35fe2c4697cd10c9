"""Applies the calibrated speeds of pods and links to the fleet, and shares them between routers.

The fleet gets the current coefficients once a second. With a Redis, the coefficients of each served model are exchanged
with the other routers every few seconds, so that a new router starts with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from router.feeds.supervise import Feeds
from router.fleet.fleet import Fleet
from router.policy.calibration import Calibration, class_key
from router.policy.calibrator import Calibrator
from router.types import Links, Pod

if TYPE_CHECKING:
    from router.stores.shared_state import SharedCalibration

APPLY_S = 1.0
EXCHANGE_S = 5.0


@dataclass(slots=True, eq=False)
class CalibrationFeed:
    """Applies and shares one calibration. `configured()` are the pods with their priors' speeds; `shared(model)` is the
    exchange of one model."""

    fleet: Fleet
    calibrator: Calibrator
    configured: Callable[[], Iterable[Pod]]
    shared: Callable[[str], SharedCalibration] | None = None
    _exchanges: dict[str, SharedCalibration] = field(default_factory=dict)

    @property
    def runs(self) -> Feeds:
        return {"calibration": self.apply_forever} | ({"shared calibration": self.share} if self.shared else {})

    async def apply_forever(self) -> None:
        while True:
            self.apply()
            await asyncio.sleep(APPLY_S)

    async def share(self) -> None:
        from router.feeds.backoff import Backoff  # imports redis, which a router without a cluster does not need

        backoff = Backoff("shared calibration")
        while True:
            if await backoff.attempt(self._exchange):
                await asyncio.sleep(EXCHANGE_S if self._exchanges else APPLY_S)

    async def _exchange(self) -> None:
        assert self.shared is not None
        for model in sorted({status.pod.base_model for status in self.fleet.snapshot.pods} - {""}):
            if model not in self._exchanges:
                self._exchanges[model] = self.shared(model)
            await self._exchanges[model].exchange(self.calibrator.calibration)

    def apply(self) -> None:
        calibration, priors = self.calibrator.calibration, {pod.id: pod.speed for pod in self.configured()}
        self.calibrator.priors = priors
        speeds = {
            status.pod.id: calibration.speed(class_key(status.pod), status.pod.id, priors[status.pod.id])
            for status in self.fleet.snapshot.pods
            if status.pod.id in priors
        }
        self.fleet.calibrate(speeds, calibrated_links(calibration, self.calibrator.links))


def calibrated_links(calibration: Calibration, configured: Links) -> Links:
    links = {place.name: getattr(configured, place.name) for place in fields(configured)}
    return Links(**{name: link and calibration.link(link.kind, link) for name, link in links.items()})
