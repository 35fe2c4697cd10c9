"""Applies the calibrated speeds of pods and links to the fleet, once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from router.fleet.fleet import Fleet
from router.policy.calibration import Calibration, class_key
from router.policy.calibrator import Calibrator
from router.types import Links, Pod

APPLY_S = 1.0


@dataclass(slots=True, eq=False)
class CalibrationFeed:
    """Applies one calibration. `configured()` are the pods with their priors' speeds."""

    fleet: Fleet
    calibrator: Calibrator
    configured: Callable[[], Iterable[Pod]]

    async def run(self) -> None:
        while True:
            self.apply()
            await asyncio.sleep(APPLY_S)

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
