"""Workers without processes: shared views over a bus in memory, with a manual clock and lost messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.config.policy_files import load_classes
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.index.stored_responses import StoredResponses
from router.observe.metrics import Metrics
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.classes import Classes
from router.stores.prefix_store import LocalStore
from router.types import Generation, InFlight, Link, Links, Pod, PodSpeed, PodState, PromptPrefix
from router.workers.shared_view import SharedOwners, SharedView

SPEED = PodSpeed(5.0, 0.1, 0.0)
PODS = ("a", "b", "c")
RULES = load_classes(None)
METRICS = Metrics()


def pod(name: str) -> Pod:
    return Pod(id=name, url=f"http://{name}:8000", engine="vllm", speed=SPEED, models=("m",), kv_bytes_per_token=1000)


def prefix(*blocks: int) -> PromptPrefix:
    return PromptPrefix(Generation(model="m"), (), blocks)


@dataclass
class FakeWorker:
    """One worker; `applied` are the commands of other workers that it carried out."""

    number: int
    group: FakeWorkers
    applied: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        fleet = Fleet(Links(elsewhere=Link(1.0, 1e6, "rdma")))
        fleet.sync([pod(name) for name in PODS])
        for name in PODS:
            fleet.event(name, PodEvent.PROBE_OK)
        calibrator = Calibrator(Calibration(), METRICS, Links(elsewhere=Link(1.0, 1e6, "rdma")))
        calibrator.priors = dict.fromkeys(PODS, SPEED)
        self.owners = SharedOwners(
            fleet, Ledger(), Breaker(fleet), LocalStore(), calibrator, Classes(RULES), StoredResponses()
        )
        self.view = SharedView(
            self.owners, self.apply_command, self.publish, self.group.call_later, lambda: self.group.now_s
        )

    def apply_command(self, subject: str, wanted: str) -> None:
        self.applied.append((subject, wanted))

    async def answer(self, question: bytes) -> bytes:
        return question

    def publish(self, news: bytes) -> None:
        if self.group.workers[self.number] is not self:
            return  # it has died
        for other in self.group.workers:
            if other is not self and other.number not in self.group.disconnected:
                other.view.apply_remote(self.number, news)

    def state(self, name: str) -> PodState:
        status = self.owners.fleet.status(name)
        assert status is not None
        return status.state

    def inflight(self) -> dict[str, InFlight]:
        return dict(self.owners.ledger.inflight())


class FakeWorkers:
    """All workers. Their updates wait for `settle`; `disconnected` workers receive nothing until `reconnect`."""

    def __init__(self, workers: int = 2) -> None:
        self.now_s = 1000.0
        self.disconnected: set[int] = set()
        self.workers: list[FakeWorker] = []
        self.waits: list[float] = []
        self._due: list[Callable[[], None]] = []
        for number in range(workers):
            self.workers.append(FakeWorker(number, self))
            self.workers[number].view.begin()

    def call_later(self, after_s: float, call: Callable[[], None]) -> None:
        self.waits.append(after_s)
        self._due.append(call)

    def settle(self) -> None:
        """Deliver all scheduled updates."""
        while self._due:
            self._due.pop(0)()

    def reconnect(self) -> None:
        """Send a snapshot of every worker to each disconnected one."""
        for number in sorted(self.disconnected):
            for other in self.workers:
                if other.number != number:
                    self.workers[number].view.apply_remote(other.number, other.view.snapshot())
        self.disconnected.clear()

    def replace(self, number: int) -> FakeWorker:
        """Replace a dead worker by a new one."""
        new = FakeWorker(number, self)
        for other in self.workers:
            if other.number != number:
                other.view.remove_worker(number)
                new.view.apply_remote(other.number, other.view.snapshot())
        for name in PODS:  # as by the feed of its KV events
            new.owners.local.forget(name)
        new.view.begin()
        self.workers[number] = new
        return new
