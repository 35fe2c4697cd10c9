"""The checks of a pod run when they are due, in the order of the table, and no lane delays another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.feeds.watch import MIN_REPEAT_S, Check, Turn, Watch
from router.fleet.fleet import Fleet, PodEvent
from router.types import Pod, PodId
from tests.kit.deadlines import running, until
from tests.kit.scenes import fleet_of, make_pod
from tests.kit.virtual_time import run_virtually

pytestmark = pytest.mark.anyio

NEVER_S = 1e6


class Scripted:
    """Checks that record their runs as (name, pod)."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, PodId]] = []
        self.gone: list[PodId] = []
        self.results: dict[str, list[bool | Exception | None]] = {}
        """The results of the next runs of a check."""
        self.hangs: set[str] = set()
        self.begun = self.ended = 0

    def check(self, name: str, every_s: float = NEVER_S, **options: Any) -> Check:
        async def run(pod: Pod, _turn: Turn) -> bool | None:
            self.runs.append((name, pod.id))
            self.begun += 1
            try:
                if name in self.hangs:
                    await asyncio.Event().wait()
                result = results.pop(0) if (results := self.results.get(name, [])) else None
                if isinstance(result, Exception):
                    raise result
                return result
            finally:
                self.ended += 1

        row = {"due": lambda _status: True, "every_s": lambda _status: every_s, "forget": self.gone.append, **options}
        return Check(name=name, run=run, **row)

    def count(self, name: str) -> int:
        return sum(one == name for one, _ in self.runs)


@pytest.fixture
def script() -> Scripted:
    return Scripted()


def watch(fleet: Fleet, *lanes: list[Check]) -> Any:
    return Watch(fleet, lanes).run()


async def test_the_checks_of_a_lane_run_in_the_order_of_the_table(script: Scripted) -> None:
    """What one of them shows makes the next one due."""
    fleet = fleet_of(make_pod("a"))
    shown = script.check("hits", due=lambda _: script.count("self-test") > 1)
    async with running(watch(fleet, [script.check("facts"), script.check("self-test", 0.001), shown])):
        await until(lambda: script.count("hits"))
    assert script.runs == [("facts", "a"), ("self-test", "a"), ("self-test", "a"), ("hits", "a")]


async def test_a_check_that_hangs_delays_no_other_lane(script: Scripted) -> None:
    """It runs once at a time, and is cancelled with the watch."""
    script.hangs.add("self-test")
    before = asyncio.all_tasks()
    async with running(watch(fleet_of(make_pod("a")), [script.check("probe", 0.001)], [script.check("self-test")])):
        await until(lambda: script.count("probe") > 5)
        assert script.count("self-test") == 1
    assert script.begun == script.ended
    assert asyncio.all_tasks() == before


async def test_a_pod_without_a_check_that_runs_has_no_task(script: Scripted) -> None:
    fleet, before = fleet_of(*(make_pod(f"p{number}") for number in range(50))), len(asyncio.all_tasks())
    async with running(watch(fleet, [script.check("probe")], [script.check("load")], [script.check("self-test")])):
        await until(lambda: script.ended == 150)
        await until(lambda: len(asyncio.all_tasks()) == before + 1)


async def test_pods_are_watched_while_they_exist(script: Scripted) -> None:
    """Those that are there at the start, that join later and that return; of one that is gone nothing is kept."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    script.hangs.add("probe")
    feed = Watch(fleet, [[script.check("probe")]])
    async with running(feed.run()):
        await until(lambda: script.runs == [("probe", "a")])
        fleet.sync([make_pod("a"), make_pod("b")])
        await until(lambda: script.runs[1:] == [("probe", "b")])
        fleet.sync([make_pod("b")])
        await until(lambda: script.ended == 1)
        assert (script.gone, [*feed._lanes]) == (["a"], ["b"])
        fleet.sync([make_pod("a"), make_pod("b")])
        await until(lambda: script.runs[2:] == [("probe", "a")])
    assert (feed._lanes, fleet._listeners) == ({}, [])


async def test_each_check_is_due_when_its_own_pod_changes(script: Scripted) -> None:
    """Its state or its epoch; also while the check runs."""
    fleet = fleet_of(make_pod("a"), make_pod("b"))
    async with running(watch(fleet, [script.check("probe")])):
        await until(lambda: script.ended == 2)
        fleet.event("a", PodEvent.EJECT)
        await until(lambda: script.runs[2:] == [("probe", "a")])
        script.runs.clear()
        fleet.restarted("b")
        await asyncio.sleep(0)
        fleet.restarted("b")
        await until(lambda: script.runs == [("probe", "b")] * 2)


def test_a_pod_that_says_yes_and_no_in_turn_is_not_asked_as_fast_as_it_answers() -> None:
    """Each result changes the pod, and a change makes its checks due."""
    fleet, asked = fleet_of(make_pod("a")), list[PodEvent]()

    async def run(pod: Pod, _turn: Turn) -> None:
        asked.append(PodEvent.UNDRAIN if len(asked) % 2 else PodEvent.DRAIN)
        fleet.event(pod.id, asked[-1])

    async def watched() -> None:
        watching = asyncio.ensure_future(
            watch(fleet, [Check(name="load", run=run, due=lambda _: True, every_s=lambda _: NEVER_S)])
        )
        await asyncio.sleep(10.0)
        watching.cancel()

    run_virtually(watched())
    assert 10 < len(asked) <= 10.0 / MIN_REPEAT_S + 1


async def test_a_check_that_passed_runs_again_in_the_next_epoch(script: Scripted) -> None:
    """Not before: neither after its interval nor when the state of the pod changes. Without a result it runs again."""
    fleet = fleet_of(make_pod("a"))
    script.results["hits"] = [False, None, True, True]
    async with running(watch(fleet, [script.check("hits", 0.001, once=True)], [script.check("probe", 0.001)])):
        await until(lambda: script.count("hits") == 3)
        fleet.event("a", PodEvent.EJECT)
        probes = script.count("probe")
        await until(lambda: script.count("probe") > probes + 5)
        assert script.count("hits") == 3
        fleet.restarted("a")
        await until(lambda: script.count("hits") == 4)


async def test_the_result_of_an_earlier_epoch_does_not_count(script: Scripted) -> None:
    fleet, seen = fleet_of(make_pod("a")), list[int]()

    async def run(pod: Pod, turn: Turn) -> bool:
        seen.append(turn.failures)
        if len(seen) == 1:
            fleet.restarted(pod.id)
        return len(seen) == 1

    check = Check(name="test", run=run, due=lambda _: True, every_s=lambda _: 0.001, once=True)
    async with running(watch(fleet, [check])):
        await until(lambda: len(seen) == 4)
    assert seen == [0, 0, 1, 2]


async def test_failures_in_a_row_double_the_pause(script: Scripted) -> None:
    """Up to a limit; a check without one is repeated at its interval."""
    [status] = fleet_of(make_pod("a")).snapshot.pods
    for max_s, pauses in ((5.0, [1.0, 2.0, 4.0, 5.0]), (0.0, [1.0] * 4)):
        turn = Turn(script.check("test", 1.0, max_s=max_s))
        found = []
        for failures in range(4):
            turn.failures = failures
            found.append(turn.pause_s(status))
        assert found == pauses


async def test_an_error_of_a_check_is_logged_once_and_stops_no_other_lane(script: Scripted) -> None:
    """It runs again after a pause."""
    fleet = fleet_of(make_pod("a"))
    script.results["facts"] = [RuntimeError("broken"), RuntimeError("broken")]
    with capture_logs() as logs:
        async with running(watch(fleet, [script.check("facts", 0.001)], [script.check("load", 0.001)])):
            await until(lambda: script.count("facts") > 3)
            assert script.count("load") > 5
    assert [(line["event"], line["feed"]) for line in logs] == [("feed failed; restarting", "facts of a")]
