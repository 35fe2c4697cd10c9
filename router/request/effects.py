"""What a front does for a request: all that takes time, or moves bytes.

A front implements `Effects`; `request/` awaits its methods and knows no socket, task, thread or clock. Methods that
answer at once make a request run to its end without a loop (`tests/kit/memory_front.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:  # a connection needs the client's side alone, and no core
    from router.admission.admission_queue import AdmissionQueue
    from router.admission.fair_order import Waiting
    from router.admission.tenant import Tenant
    from router.decision import Candidate
    from router.errors import RouterError
    from router.index.stored_responses import StoredResponse
    from router.request.inbound import HeaderList
    from router.request.tracker import Tracker
    from router.types import InferenceRequest, PromptPrefix

T = TypeVar("T")


class Downstream(Protocol):
    """The client's side of a response. After `started` no retry is possible."""

    @property
    def started(self) -> bool:
        """Whether anything was sent to the client."""

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed the connection."""

    @property
    def was_slow(self) -> bool:
        """Whether the response had to wait for the client."""

    def start(self, status: int, headers: HeaderList) -> None:
        """Send status and headers."""

    def put(self, piece: bytes) -> bool:
        """Send a piece of body. False: do not send more before `ready` has returned."""

    async def ready(self) -> None:
        """Wait until the client can receive more, and a large piece may be next."""

    def finish(self) -> None:
        """End the response."""


class Turns(Protocol):
    """How requests wait for a place in front of the fleet. The front calls `RequestQueues.send_next` when a request
    begins or stops to wait, and while requests wait, after the milliseconds that the last call returned."""

    def turn(self, queue: AdmissionQueue, one: Waiting) -> Awaitable[None]:
        """Wait until `go` is called for a request in this queue. Raises its error."""

    def go(self, one: Waiting, error: Exception | None) -> None:
        """End the `turn` of a request: it may be sent, or is refused with this error."""


class Effects(Turns, Protocol):
    """What a request needs of its front. A request that is cancelled while it waits is settled, as any other."""

    def located(self, response_id: str, param: str, owner: str | None) -> Awaitable[StoredResponse]:
        """A stored response of `owner`, also of another router; None: of an operator, who may see all. `param`: the
        field with the id. Raises `UnknownResponse`."""

    def tokens(self, request: InferenceRequest) -> Awaitable[PromptPrefix | str | None]:
        """The prompt, rendered and tokenized; else why it cannot be known, if that is known."""

    def without_uuids(self, body: bytes, tenant: Tenant) -> Awaitable[bytes]:
        """The body without the `uuid` of pictures. Raises `MalformedRequest`."""

    def quota_sync(self) -> Awaitable[None]:
        """Wait until shares of quotas have been exchanged with other processes."""

    def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> Awaitable[None]:
        """Send the request to the pods of a candidate, or to its provider, and relay the response. It is booked. Raises
        `UpstreamError`."""

    def pod_again(self, request: InferenceRequest, owner: str, tenant: Tenant, until_s: float) -> Awaitable[None]:
        """Wait until a pod may serve a request whose last one was gone before it received it. Raises `NoReadyPod` at
        this time of the loop. Not of fronts where no request waits for pods."""
        raise AssertionError("no request waits for pods here")

    def answer(self, pieces: Iterator[bytes], request_id: str, client: Downstream) -> Awaitable[None]:
        """Send the router's own response."""

    def later(self, delay_s: float, call: Callable[[float], None]) -> None:
        """Call with the time after this delay, also when the request has ended."""

    def in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """What takes up to 40 ms of CPU, done in a thread where there is an event loop."""

    def overdue(self, client: Downstream) -> RouterError | None:
        """Why a request was cancelled that neither its client nor the router has given up."""
        return None
