"""What must every worker of a router know of what the others do?

    work         each worker's sums in flight, by pod; they end with it
    held         what is held against a pod, failures and lateness; whoever ejects a pod ejects it for all
    dispatched   the blocks of every prompt that was sent somewhere: for the index, and for what goes on from it
    lessons      what pods and links have shown of their speed
    loads        what pods said of themselves: each is asked as often as by one router, by the workers in turn
    orders       pods that people added, removed and drained while serving

Of work, held and orders only the latest counts, so that one who missed something is told the whole and agrees again.
What changes is gathered for a millisecond at the most, and told to all at once. KV events, probes and policy files are
followed by every worker itself. This file never sends: `bus.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Protocol

import msgspec

from router.feeds.beside.recent import Dispatch, Recent
from router.fleet.breaker import Breaker, Held
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.hashing import hash_array
from router.observe.calibrator import Calibrator, PrefillReport, SpeedReport
from router.policy.calibration import UnreadableCalibration
from router.policy.classes import Classes
from router.stores.prefix_store import LocalStore
from router.types import BlockHash, InFlight, Pod, PodId, PodLoad, PodState

GATHER_S = 0.001
"""Between two times that the others are told something."""


class Order(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What somebody wants of a pod, or of the policies, and when that was said; the latest counts."""

    at_s: float
    wanted: str


class News(msgspec.Struct, omit_defaults=True):
    """What one worker tells the others. `whole`: it replaces all that it said of its own work."""

    whole: bool = False
    work: dict[PodId, InFlight | None] = {}
    held: dict[PodId, Held | None] = {}
    dispatched: list[Dispatch] = []
    lessons: list[SpeedReport] = []
    loads: dict[PodId, PodLoad] = {}
    orders: dict[str, Order] = {}
    calibration: bytes = b""
    used: list[PodId] = []
    """Pods that it sends requests to."""


class Program(Protocol):
    """What else carries out what other workers were told, or answers them."""

    def obey(self, subject: str, wanted: str) -> None:
        """Somebody ordered this at another worker."""

    async def answer(self, question: bytes) -> bytes:
        """What another worker asked."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose facts are shared."""

    fleet: Fleet
    ledger: Ledger
    breaker: Breaker
    local: LocalStore
    calibrator: Calibrator
    classes: Classes


class SharedView:
    """One worker's part. `soon` calls something after so many seconds; `say` tells the other workers."""

    def __init__(
        self,
        owners: Owners,
        program: Program,
        say: Callable[[bytes], None],
        soon: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owners = owners
        self._program = program
        self._say = say
        self._soon = soon
        self._clock = clock
        self._due = False
        self._told_s = 0.0
        self._news = News()
        self._work: set[PodId] = set()
        self._held: set[PodId] = set()
        self._recent = Recent()
        self._early: list[Dispatch] | None = []
        """What was heard before `begin`: a pod that a worker gets to know has nothing sent to it."""
        self._orders: dict[str, Order] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(News).decode
        self.used_elsewhere: set[PodId] = set()
        """Pods that others sent requests to when this one began."""
        owners.fleet.listen(self._forget_the_gone)
        owners.ledger.told = self._worked
        owners.breaker.told = self._holds
        owners.local.told = self._dispatched
        owners.calibrator.on_report = self._learnt

    # --- what is told ---

    def loaded(self, pod: PodId, load: PodLoad) -> None:
        """A pod has said how busy it is."""
        self._news.loads[pod] = load
        self._due_soon()

    def order(self, subject: str, wanted: str) -> None:
        """Somebody orders this here; the others obey."""
        known = self._orders.get(subject)
        at_s = max(self._clock(), nextafter(known.at_s, inf)) if known else self._clock()
        self._orders[subject] = self._news.orders[subject] = Order(at_s, wanted)
        self._due_soon()

    def ordered(self, subject: str) -> str:
        """What was ordered last; empty for nothing."""
        known = self._orders.get(subject)
        return known.wanted if known else ""

    def whole(self) -> bytes:
        """Everything that a worker must know that knows nothing of this one."""
        owners = self._owners
        return self._encode(
            News(
                whole=True,
                work=dict(owners.ledger.own()),
                held=dict(owners.breaker.held()),
                dispatched=self._recent.alive(self._clock()),
                loads={status.pod.id: status.load for status in owners.fleet.snapshot.pods},
                orders=self._orders,
                calibration=owners.calibrator.calibration.dump(),
                used=[status.pod.id for status in owners.fleet.snapshot.pods if status.state is PodState.READY],
            )
        )

    def tell(self) -> None:
        """The others what has changed since they were last told."""
        news, self._news = self._news, News()
        ledger, breaker = self._owners.ledger, self._owners.breaker
        news.work = {pod: ledger.own_on(pod) for pod in self._work}
        news.held = {pod: breaker.held_against(pod) for pod in self._held}
        self._work.clear()
        self._held.clear()
        self._due, self._told_s = False, self._clock()
        self._say(self._encode(news))

    def _worked(self, pod: PodId) -> None:
        self._work.add(pod)
        self._due_soon()

    def _holds(self, pod: PodId) -> None:
        self._held.add(pod)
        self._due_soon()

    def _dispatched(self, pod: PodId, blocks: Sequence[BlockHash], ttl_s: float, capacity_blocks: int | None) -> None:
        sent = Dispatch(pod, hash_array(blocks).tobytes(), ttl_s, capacity_blocks)
        self._recent.add(sent, self._clock())
        self._news.dispatched.append(sent)
        self._due_soon()

    def _forget_the_gone(self, pod: Pod, old: PodState, new: PodState) -> None:
        if new is old or new is PodState.GONE:
            self._recent.forget(pod.id)

    def _learnt(self, lesson: SpeedReport) -> None:
        self._news.lessons.append(lesson)
        self._due_soon()

    def _due_soon(self) -> None:
        if not self._due:
            self._due = True
            self._soon(max(0.0, self._told_s + GATHER_S - self._clock()), self.tell)

    # --- what is heard ---

    def begin(self) -> None:
        """The pods are known: from now on it counts what was sent to them."""
        early, self._early = self._early or (), None
        for sent in early:
            self._hear_dispatch(sent)

    def hear(self, worker: int, news: bytes) -> None:
        """Another worker said this. Raises `ValueError` where it means nothing."""
        found, owners, now_s = self._decode(news), self._owners, self._clock()
        if found.whole:
            owners.ledger.worker_gone(worker)
            self.used_elsewhere.update(found.used)
            self._learn_all(found.calibration)
        self._hear_work(worker, found.work)
        for pod, held in found.held.items():
            owners.breaker.apply_remote(pod, held, now_s)
        for sent in found.dispatched:
            self._hear_dispatch(sent)
        for lesson in found.lessons:
            self._hear_lesson(lesson)
        for pod, load in found.loads.items():
            known = owners.fleet.status(pod)
            if known is not None and known.load.scraped_at_s < load.scraped_at_s:
                owners.fleet.observe_load(pod, load)
        for subject, order in found.orders.items():
            self._hear_order(subject, order)

    def lost(self, worker: int) -> None:
        """It is gone, and so are its requests."""
        self._owners.ledger.worker_gone(worker)

    async def answer(self, question: bytes) -> bytes:
        """What another worker asked."""
        return await self._program.answer(question)

    def _hear_work(self, worker: int, rows: Mapping[PodId, InFlight | None]) -> None:
        """A pod's times are not those of our prompts alone while it computes others'."""
        self._owners.ledger.worker(worker, rows)
        for pod, work in rows.items():
            if work is not None and work.prefill_requests:
                self._owners.calibrator.clock(pod).disturbed()

    def _hear_dispatch(self, sent: Dispatch) -> None:
        if self._early is not None:
            self._early.append(sent)
            return
        owners, blocks, now_s = self._owners, hash_array(), self._clock()
        blocks.frombytes(sent.blocks)
        owners.local.hear(sent.pod, blocks, now_s, ttl_s=sent.ttl_s, capacity_blocks=sent.capacity_blocks)
        owners.classes.apply_remote(blocks, now_s)

    def _hear_lesson(self, lesson: SpeedReport) -> None:
        fleet, calibrator = self._owners.fleet, self._owners.calibrator
        if isinstance(lesson, PrefillReport):
            computed = fleet.status(lesson.pod)
            if computed is not None:
                calibrator.observe_prefill(computed.pod, lesson.seen, self._clock(), remote=True)
            return
        sender, receiver = fleet.status(lesson.sender), fleet.status(lesson.receiver)
        if sender is not None and receiver is not None:
            calibrator.observe_transfer(
                sender.pod, receiver.pod, lesson.tokens, lesson.elapsed_ms, lesson.concurrent, remote=True
            )

    def _hear_order(self, subject: str, order: Order) -> None:
        known = self._orders.get(subject)
        if known is None or order > known:
            self._orders[subject] = order
            self._program.obey(subject, order.wanted)

    def _learn_all(self, calibration: bytes) -> None:
        try:
            self._owners.calibrator.calibration.load(calibration)
        except UnreadableCalibration as error:
            raise ValueError(str(error)) from error
