"""A second front: it drives a core by bytes from memory, without sockets, tasks or threads. The answers of pods, the
client's leaving and the time are calls of a test."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_order import Waiting
from router.admission.names import Names, NamesInUse
from router.admission.tenant import OPEN_TENANT, Tenant
from router.decision import Candidate
from router.endpoints import endpoint_of
from router.errors import RouterError, UpstreamError, status_of
from router.hashing import hash_array, token_array
from router.index.stored_responses import StoredResponse
from router.phases import Phases
from router.request.context import RequestContext
from router.request.effects import Downstream, Effects
from router.request.error_responses import error_body
from router.request.fleet_state import Clock
from router.request.inbound import Head, HeaderList
from router.request.life import Core
from router.request.reading import RequestReader
from router.request.response_reader import reader_of
from router.request.tracker import Tracker
from router.types import Generation, InferenceRequest, PromptPrefix
from tests.kit.cores import EVENT_HEADERS, JSON_HEADERS, CoreOfPods, pods_at

CHAT = "/v1/chat/completions"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array([1, 2, 3]))
T = TypeVar("T")
ReadPrompt = Callable[[InferenceRequest], PromptPrefix | None]


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Wait until the coroutine is resumed."""
    yield


@dataclass(eq=False)
class MemoryExchange(Effects):
    """One request and its response, and what it waits for. `asked` are the pods that it was sent to."""

    core: Core
    context: RequestContext | None = None
    read: ReadPrompt = lambda _request: None
    waiting: dict[Waiting, MemoryExchange] = field(default_factory=dict)
    """All requests that wait in front of the fleet."""
    queues: dict[AdmissionQueue, None] = field(default_factory=dict)
    tracker: Tracker | None = None
    status: int = 0
    received: bytes = b""
    error: RouterError | None = None
    asked: list[str] = field(default_factory=list)
    is_over: bool = False
    disconnected: bool = False
    was_slow: bool = False
    waits_until_s: float = 0.0
    """Until when it waits for a pod again, or did."""

    # --- the client ---

    @property
    def started(self) -> bool:
        return bool(self.received)

    def start(self, status: int, headers: HeaderList) -> None:
        self.status = status

    def put(self, piece: bytes) -> bool:
        self.received += piece
        return True

    async def ready(self) -> None: ...
    def finish(self) -> None: ...

    def leave(self) -> None:
        """The client disconnects."""
        self.disconnected = self.is_over = True
        for one in [one for one, exchange in self.waiting.items() if exchange is self]:
            del self.waiting[one]
        self._life.close()

    # --- the life of the request ---

    def serve(self) -> None:
        """Go on until the request waits for its pod, or its turn."""
        assert self.context is not None
        self.run(self.core.serve(self.context, self, self))

    def attempt_decided(self) -> None:
        """Send the decided request to its first pod, unless none may serve it."""
        assert self.context is not None
        self.run(self._decided(self.context))

    async def _decided(self, context: RequestContext) -> None:
        endings = self.core.endings
        try:
            await self.core.attempts(self.core.tracker(context), self, self)
        except RouterError as error:
            endings.failed(context, error, has_answered=self.started)
            raise
        except GeneratorExit:
            endings.interrupted(context, by_client=self.disconnected)
            raise
        finally:
            endings.end(context)

    def run(self, life: Coroutine[Any, Any, None]) -> None:
        self._life = life
        self.resume()

    def resume(self, error: Exception | None = None) -> None:
        try:
            if error is None:
                self._life.send(None)
            else:
                self._life.throw(error)
        except StopIteration:
            self.is_over = True
        except RouterError as refusal:
            self.refuse(refusal)

    def refuse(self, error: RouterError) -> None:
        """Answer with an error, if nothing was sent."""
        self.is_over = True
        if not self.started:
            self.error, self.status, self.received = error, status_of(error), error_body(error)

    # --- effects ---

    async def located(self, response_id: str, param: str, owner: str | None) -> StoredResponse:
        raise NotImplementedError

    async def tokens(self, request: InferenceRequest) -> PromptPrefix | None:
        return self.read(request)

    async def without_uuids(self, body: bytes, tenant: Tenant) -> bytes:
        return body

    async def quota_sync(self) -> None: ...

    def later(self, delay_s: float, call: Callable[[float], None]) -> None: ...

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()

    async def answer(self, pieces: Iterator[bytes], request_id: str, client: Downstream) -> None:
        self.status, self.received = 200, b"".join(pieces)

    async def turn(self, queue: AdmissionQueue, one: Waiting) -> None:
        self.waiting[one] = self
        self.queues[queue] = None
        await pause()

    def go(self, one: Waiting, error: Exception | None) -> None:
        self.waiting.pop(one).resume(error)

    async def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> None:
        self.tracker = tracker
        self.asked.append(candidate.pod.id)
        await pause()

    async def pod_again(self, request: InferenceRequest, owner: str, tenant: Tenant, until_s: float) -> None:
        self.waits_until_s = until_s
        await pause()

    # --- what pods do ---

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
        self.resume()

    def fail(self, error: UpstreamError) -> None:
        """The pod fails."""
        self.resume(error)


class MemoryFront:
    """`tokens` reads prompts."""

    def __init__(self, core: Core, reader: RequestReader, tokens: ReadPrompt) -> None:
        self._core, self._reader, self._tokens, self._numbers = core, reader, tokens, count(1)
        self._received: list[MemoryExchange] = []
        """Requests that no test holds go on, too."""
        self._waiting: dict[Waiting, MemoryExchange] = {}
        self._queues: dict[AdmissionQueue, None] = {}

    def receive(
        self, path: str, body: bytes, tenant: Tenant = OPEN_TENANT, stored: StoredResponse | None = None, **head: Any
    ) -> MemoryExchange:
        """Take one request, and send it to a pod unless it is refused or waits. `stored`: the response that its path
        names; `head`: other fields of a `Head`."""
        exchange = MemoryExchange(self._core, None, self._tokens, self._waiting, self._queues)
        self._received.append(exchange)
        endpoint, request_id = endpoint_of(path), f"req-{next(self._numbers)}"
        try:
            request = self._reader.read(endpoint, {}, body, request_id, tenant, stored.model if stored else "")
        except RouterError as error:
            self._core.endings.refused(endpoint, error, request_id, tenant=tenant)
            exchange.refuse(error)
            return exchange
        given = {"method": "POST", "headers": [], **head}
        phases, asked = Phases(self._core.clock.now_s()), Head(id=request_id, target=path.encode(), **given)
        exchange.context = RequestContext(request, asked, phases, reader=reader_of(endpoint), tenant=tenant)
        if stored is not None:
            exchange.context.stored_pod = stored.pod
        exchange.serve()
        return exchange

    def send_waiting(self) -> None:
        """Send all requests that have a place by now."""
        for queue in self._queues:
            assert self._core.queues is not None
            while self._waiting and queue:
                turns = next(iter(self._waiting.values()))
                if self._core.queues.send_next(queue, self._core.clock.now_s(), turns):
                    break


class MemoryRouter:
    """A router in memory: three pods, a front without sockets, and a clock that a test moves."""

    def __init__(self, names: Names | None = None, **settings: Any) -> None:
        self.now_s = 100.0
        clock = Clock(lambda: self.now_s, lambda: 1e9 + self.now_s)
        self.known = CoreOfPods(pods_at({name: f"http://{name}" for name in "abc"}), clock=clock, **settings)
        names_in_use = NamesInUse(names) if names else None
        hosted = self.known.core.rules.hosted
        reader = RequestReader(self.known.fleet, self.known.config.edge, 100, frozenset(), names_in_use, hosted)
        self.read: list[InferenceRequest] = []
        self.front = MemoryFront(self.known.core, reader, self._tokens)

    def _tokens(self, request: InferenceRequest) -> PromptPrefix:
        self.read.append(request)
        return PROMPT

    def chat(self, tenant: Tenant | None = None, **fields: Any) -> MemoryExchange:
        """Receive a streamed chat."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        return self.front.receive(CHAT, json.dumps(body).encode(), tenant=tenant or OPEN_TENANT)

    def ended(self) -> list[tuple[str, int]]:
        """(result, tries) of the requests that ended."""
        return [(one.result, one.tries) for one in self.known.ended]
