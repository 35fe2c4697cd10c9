"""When does what was learnt about pods and links take effect?

Once a second the fleet gets the coefficients that are known by now; every few seconds, with a Redis, what this router
and its replicas have learnt is exchanged, so that a router that starts knows what the others know. This file never
learns anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import fields

from router.feeds.backoff import Backoff
from router.fleet.fleet import Fleet
from router.observe.calibrator import Calibrator, class_key
from router.policy.calibration import Calibration
from router.stores.shared_state import SharedCalibration
from router.types import Link, Links, Pod

APPLY_S = 1.0
EXCHANGE_S = 5.0


class CalibrationFeed:
    """Applies and shares one calibration. `configured` are the pods with the speeds that were configured."""

    def __init__(
        self,
        fleet: Fleet,
        calibrator: Calibrator,
        configured: Callable[[], Iterable[Pod]],
        shared: SharedCalibration | None = None,
    ) -> None:
        self._fleet = fleet
        self._calibrator = calibrator
        self._configured = configured
        self._shared = shared

    @property
    def runs(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What must run."""
        return {"calibration": self.apply_forever} | ({"shared calibration": self.share} if self._shared else {})

    async def apply_forever(self) -> None:
        """Until cancelled."""
        while True:
            self.apply()
            await asyncio.sleep(APPLY_S)

    async def share(self) -> None:
        """Until cancelled."""
        assert self._shared is not None
        backoff = Backoff("calibration of the other routers")
        while True:
            if await backoff.attempt(self._exchange):
                await asyncio.sleep(EXCHANGE_S)

    async def _exchange(self) -> None:
        assert self._shared is not None
        await self._shared.exchange(self._calibrator.calibration)

    def apply(self) -> None:
        """Give the fleet what is known now."""
        calibration, priors = self._calibrator.calibration, {pod.id: pod.speed for pod in self._configured()}
        self._calibrator.priors = priors
        speeds = {
            status.pod.id: calibration.speed(class_key(status.pod), status.pod.id, priors[status.pod.id])
            for status in self._fleet.snapshot.pods
            if status.pod.id in priors
        }
        self._fleet.calibrate(speeds, calibrated_links(calibration, self._calibrator.links))


def calibrated_links(calibration: Calibration, configured: Links) -> Links:
    """The links as they are known now."""
    known: dict[str, Link] = {}
    for place in fields(configured):
        link: Link | None = getattr(configured, place.name)
        if link is not None:
            known[place.name] = calibration.link(link.kind, link)
    return Links(**known)
