"""A second front: it drives a core by bytes from memory, without sockets, tasks or threads. The answers of pods, the
client's leaving and the time are calls of a test."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from router.admission.tenant import OPEN_TENANT, Tenant
from router.decision import Candidate
from router.endpoints import endpoint_of
from router.errors import RouterError, UpstreamError, status_of
from router.index.stored_responses import StoredResponse
from router.phases import Phases
from router.request.context import RequestContext
from router.request.core import Core
from router.request.error_responses import error_body
from router.request.inbound import Head
from router.request.preparation_steps import Step, Ticket, Tokens
from router.request.queues import ModelQueue
from router.request.reading import RequestReader
from router.request.response_reader import reader_of
from router.request.tracker import Tracker
from router.types import InferenceRequest, PromptPrefix
from tests.request.cores import EVENT_HEADERS, JSON_HEADERS

Steps = Generator[Step, Any, Iterator[bytes] | None]


@dataclass
class MemoryExchange:
    """One request and its response. `asked` are the pods that it was sent to."""

    core: Core
    context: RequestContext | None = None
    tracker: Tracker | None = None
    status: int = 0
    received: bytes = b""
    asked: list[str] = field(default_factory=list)
    is_over: bool = False

    def attempt(self) -> None:
        """Send the decided request to its first pod, unless none may serve it."""
        assert self.context is not None
        self.tracker = self.core.requests.tracker(self.context)
        try:
            self.send(self.tracker.first(self.core.clock.now_s()))
        except RouterError as error:
            self.refuse(error)

    def head(self, status: int = 200, *, is_stream: bool = True) -> bool:
        """The response of the pod begins. False where the request goes to another pod instead."""
        assert self.tracker is not None
        try:
            headers = EVENT_HEADERS if is_stream else JSON_HEADERS
            self.tracker.head(self.asked[-1], status, headers, self.core.clock.now_s())
            self.status = status
            return True
        except UpstreamError as error:
            self.fail(error)
            return False

    def piece(self, piece: bytes) -> bool:
        """The pod sends a piece of its body. False where the request goes to another pod instead."""
        assert self.tracker is not None
        try:
            self.received += self.tracker.piece(piece, self.core.clock.now_s())
            return True
        except UpstreamError as error:
            self.fail(error)
            return False

    def end(self) -> None:
        """The response is complete, unless the request goes to another pod instead."""
        assert self.tracker is not None
        try:
            self.received += self.tracker.rest(self.core.clock.now_s())
        except UpstreamError as error:
            self.fail(error)
            return
        self.tracker.complete(self.core.clock.now_s())
        self._finish()

    def fail(self, error: UpstreamError) -> None:
        """The pod fails."""
        assert self.tracker is not None
        candidate = self.tracker.failed(error, self.core.clock.now_s())
        if candidate is None:
            self.refuse(error)
        else:
            self.send(candidate)

    def leave(self) -> None:
        """The client disconnects."""
        assert self.context is not None and self.tracker is not None
        self.core.requests.endings.interrupted(self.context, by_client=True)
        self.tracker.left(self.core.clock.now_s())
        self._finish()

    def send(self, candidate: Candidate) -> None:
        """Send the request to a pod, which is booked first."""
        assert self.tracker is not None
        self.tracker.begin(candidate, self.core.clock.now_s())
        self.asked.append(candidate.pod.id)

    def refuse(self, error: RouterError) -> None:
        """Answer with an error, if nothing was sent."""
        has_answered = bool(self.received)
        if self.context is not None:
            self.core.requests.endings.failed(self.context, error, has_answered=has_answered)
        if not has_answered:
            self.status, self.received = status_of(error), error_body(error)
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        if self.tracker is not None:
            self.tracker.end(self.core.clock.now_s())
        if self.context is not None:
            self.core.requests.endings.end(self.context)


class MemoryFront:
    """`tokens` reads prompts."""

    def __init__(
        self, core: Core, reader: RequestReader, tokens: Callable[[InferenceRequest], PromptPrefix | None]
    ) -> None:
        self._core, self._reader, self._tokens, self._numbers = core, reader, tokens, count(1)
        self.waiting: list[ModelQueue] = []
        if core.queues is not None:
            core.queues.on_change = self.waiting.append

    def receive(
        self, path: str, body: bytes, tenant: Tenant = OPEN_TENANT, stored: StoredResponse | None = None, **head: Any
    ) -> MemoryExchange:
        """Take one request, and send it to a pod unless it is refused or waits. `stored`: the response that its path
        names; `head`: other fields of a `Head`."""
        exchange, endpoint = MemoryExchange(self._core), endpoint_of(path)
        endings, request_id = self._core.requests.endings, f"req-{next(self._numbers)}"
        try:
            request = self._reader.read(endpoint, {}, body, request_id, tenant, stored.model if stored else "")
        except RouterError as error:
            endings.refused(endpoint, error, request_id, tenant=tenant)
            exchange.refuse(error)
            return exchange
        given, phases = {"method": "POST", "headers": [], **head}, Phases(self._core.clock.now_s())
        asked = Head(id=request_id, target=path.encode(), **given)
        exchange.context = RequestContext(request, asked, phases, reader=reader_of(endpoint), tenant=tenant)
        if stored is not None:
            exchange.context.concerns(stored)
        endings.begin()
        self._prepare(exchange, steps := self._core.requests.prepare(exchange.context), steps.send, None)
        return exchange

    def send_waiting(self) -> None:
        """Send all requests that have a place by now."""
        for queue in dict.fromkeys(self.waiting):
            while queue and not queue.send_next(self._core.clock.now_s()):
                pass

    def _prepare(self, exchange: MemoryExchange, steps: Steps, resume: Callable[[Any], Step], answer: Any) -> None:
        """Do what the request needs until it can be sent; a request that waits goes on when its ticket is settled."""
        try:
            while not isinstance(step := resume(answer), Ticket):
                resume, answer = steps.send, self._tokens(step.request) if isinstance(step, Tokens) else None
        except StopIteration:
            exchange.attempt()
        except RouterError as error:
            exchange.refuse(error)
        else:
            step.settle = lambda error: self._prepare(exchange, steps, steps.throw if error else steps.send, error)
