"""Applying and sharing learned speeds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.feeds.calibration_feed import CalibrationFeed, calibrated_links
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.policy.calibration import Calibration, class_key
from router.policy.calibrator import Calibrator
from router.policy.prefill_clock import PrefillObservation, TransferObservation
from router.types import Link, Links, Pod, PodSpeed
from tests.kit.scenes import make_pod

pytestmark = pytest.mark.anyio

PRIOR = PodSpeed(5.0, 0.1, 0.0)
LINK = Link(1.0, 1e6, "rdma")
POD = make_pod(speed=PRIOR)


def taught() -> tuple[Fleet, Calibrator, CalibrationFeed]:
    fleet = Fleet(Links(elsewhere=LINK))
    fleet.sync([POD])
    calibrator = Calibrator(Calibration(), Metrics(), Links(elsewhere=LINK))
    return fleet, calibrator, CalibrationFeed(fleet, calibrator, lambda: [POD])


def teach(calibrator: Calibrator) -> None:
    for _ in range(40):
        calibrator.calibration.observe_prefill(class_key(POD), "a", PRIOR, PrefillObservation(1, 1000, 10**6, 300.0))
        calibrator.calibration.observe_transfer("rdma", LINK, TransferObservation(1e7, 0, 40.0))


def known(fleet: Fleet) -> Pod:
    return fleet.snapshot.pods[0].pod


def test_fits_are_applied_to_the_fleet() -> None:
    """The next snapshot has the learned speed and link; nothing else of the pod changes."""
    fleet, calibrator, feed = taught()
    before = known(fleet)
    feed.apply()
    assert fleet.snapshot.pods[0].pod == before
    teach(calibrator)
    feed.apply()
    assert known(fleet).speed.prefill_ms(1000) == pytest.approx(300.0, rel=0.15)
    assert replace(known(fleet), speed=before.speed) == before
    elsewhere = fleet.snapshot.links.elsewhere
    assert elsewhere is not None and elsewhere.transfer_ms(1e7) == pytest.approx(40.0, rel=0.15)


def test_a_new_prior_is_corrected_and_a_repeated_one_changes_nothing() -> None:
    """Discovery repeats all pods with every change of the set."""
    fleet, calibrator, feed = taught()
    teach(calibrator)
    feed.apply()
    learnt = known(fleet).speed
    fleet.sync([POD])
    assert known(fleet).speed == learnt
    fleet.sync([replace(POD, zone="z")])
    assert known(fleet).speed == PRIOR
    feed.apply()
    assert known(fleet).speed == learnt


def test_links_that_are_not_configured_stay_unset() -> None:
    """No observation can create one."""
    assert calibrated_links(Calibration(), Links(elsewhere=LINK, cpu=LINK)) == Links(elsewhere=LINK, cpu=LINK)


async def test_fits_are_applied_at_once_at_startup() -> None:
    """The priors are then known, so that the first response can be used."""
    _, calibrator, feed = taught()
    task = asyncio.create_task(feed.run())
    while not calibrator.priors:  # a dict has nothing to await
        await asyncio.sleep(0)
    task.cancel()
    assert calibrator.priors == {"a": PRIOR}
