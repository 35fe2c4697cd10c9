"""A response on its way from pod to client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest

from router.decision import Direct
from router.errors import UpstreamBroken
from router.frontends.http.connection import Connection
from router.frontends.http.relay import end_broken_stream, read_all, relay
from router.frontends.http.upstream import Reply, UpstreamPool
from router.guards import Bound
from router.request.inbound import EVENT_STREAM, HeaderList, media_type
from router.request.response_reader import ResponseReader
from tests.kit.cores import CoreOfPods, pods_at
from tests.kit.deadlines import GENEROUS

pytestmark = pytest.mark.anyio

EVENTS = b"content-type: text/event-stream; charset=utf-8\r\n"
JSON = b"content-type: application/json\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


class Transport(asyncio.Transport):
    """Records when reading was paused (True) and resumed."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[bool] = []

    def pause_reading(self) -> None:
        self.pauses.append(True)

    def resume_reading(self) -> None:
        self.pauses.append(False)

    def is_closing(self) -> bool:
        return False


class Pod:
    """The pod's end of a connection without a socket: sent bytes arrive at once."""

    def __init__(self, headers: bytes, status: int = 200) -> None:
        timeouts = GENEROUS
        self.connection = Connection(asyncio.get_running_loop(), timeouts)
        self.transport = Transport()
        self.connection.connection_made(self.transport)
        self._send(b"HTTP/1.1 %d X\r\n%btransfer-encoding: chunked\r\n\r\n" % (status, headers))
        self.reply = Reply(UpstreamPool("a", "http://a", timeouts), self.connection)

    def send(self, piece: bytes) -> None:
        self._send(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        self._send(b"0\r\n\r\n")

    def die(self) -> None:
        self.connection.connection_lost(None)

    def _send(self, raw: bytes) -> None:
        self.connection.data_received(raw)


class Client:
    """A downstream that records what it receives, in order."""

    def __init__(self) -> None:
        self.started = False
        self.disconnected = False
        self.was_slow = False
        self.finished = False
        self.status = 0
        self.headers: HeaderList = []
        self.pieces: list[bytes] = []
        self.free = asyncio.Event()
        self.free.set()

    def start(self, status: int, headers: HeaderList) -> None:
        self.started, self.status, self.headers = True, status, headers

    def put(self, piece: bytes) -> bool:
        assert self.started
        assert not self.finished
        self.pieces.append(piece)
        return self.free.is_set()

    async def ready(self) -> None:
        await self.free.wait()

    def finish(self) -> None:
        assert self.started
        self.finished = True


class Passage:
    """One relay in progress."""

    def __init__(
        self,
        pod: Pod,
        headers: Iterable[tuple[bytes, bytes]] = (),
        reader: ResponseReader | None = None,
        *,
        stream: bool = True,
    ) -> None:
        core = CoreOfPods(pods_at({"a": "http://a"}))
        self.client, self._context = Client(), core.context(Direct(core.pod("a")), stream=stream)
        self.reader = self._context.reader = reader or ResponseReader()
        tracker = core.core.tracker(self._context)
        tracker.begin(tracker.first(0.0), 0.0)
        tracker.head("a", pod.reply.status, pod.reply.headers, 0.0)
        self.task = asyncio.ensure_future(relay(pod.reply, self.client, tracker, list(headers)))

    @property
    def has_first_token(self) -> bool:
        return self._context.first_token_s is not None

    async def until_waiting(self) -> None:
        """Let the relay run until it waits for the pod."""
        for _ in range(10):
            await asyncio.sleep(0)


async def test_pieces_are_relayed_on_arrival() -> None:
    """Each before the next is sent; status and headers with the first."""
    pod = Pod(EVENTS, status=201)
    passage = Passage(pod, [(b"x-warmroute-pod", b"a")])
    for number, piece in enumerate([b": hi\n\n", TOKEN, TOKEN], start=1):
        pod.send(piece)
        await passage.until_waiting()
        assert len(passage.client.pieces) == number
        assert passage.client.pieces[-1] == piece
        assert passage.has_first_token == (number >= 2)
    pod.end()
    await passage.task
    assert passage.client.finished
    assert passage.client.status == 201
    assert passage.client.headers == [
        (b"x-warmroute-pod", b"a"),
    ]


async def test_a_slow_client_receives_nothing_until_it_is_ready() -> None:
    """Pieces that arrive meanwhile are kept, also when the pod has closed the connection."""
    pod = Pod(EVENTS)
    passage = Passage(pod)
    pod.send(TOKEN)
    await passage.until_waiting()
    passage.client.free.clear()
    for piece in (b"1", b"2", b"3"):
        pod.send(piece)
        await passage.until_waiting()
    assert passage.client.pieces == [TOKEN, b"1"]
    assert pod.transport.pauses == [True]
    passage.client.free.set()
    await passage.until_waiting()
    assert passage.client.pieces == [TOKEN, b"1", b"23"]
    assert pod.transport.pauses == [True, False]
    passage.client.free.clear()
    pod.send(b"4")
    pod.send(b"5")
    pod.end()
    passage.client.free.set()
    await passage.task
    assert b"".join(passage.client.pieces) == TOKEN + b"12345"


async def test_nothing_starts_before_the_first_piece_of_a_stream() -> None:
    """A pod that fails until then can be replaced."""
    pod = Pod(EVENTS)
    passage = Passage(pod)
    await passage.until_waiting()
    assert not passage.client.started
    pod.die()
    with pytest.raises(UpstreamBroken):
        await passage.task
    assert not passage.client.started


async def test_a_broken_stream_has_started_and_is_not_finished() -> None:
    """The caller must end it with an error event."""
    pod = Pod(EVENTS)
    pod.send(TOKEN)
    passage = Passage(pod)
    await passage.until_waiting()
    pod.die()
    with pytest.raises(UpstreamBroken):
        await passage.task
    assert passage.client.started
    assert not passage.client.finished
    assert passage.client.pieces == [TOKEN]


async def test_an_empty_response_is_relayed() -> None:
    """Status and headers, no body."""
    pod = Pod(JSON)
    pod.end()
    passage = Passage(pod)
    await passage.task
    assert passage.client.finished
    assert passage.client.pieces == []


async def test_read_all_has_a_limit() -> None:
    """Up to the limit the body is read; a longer one is an error."""
    fits, too_long = Pod(JSON), Pod(JSON)
    for pod in (fits, too_long):
        pod.send(b"abc")
        pod.send(b"abc")
        pod.end()
    assert await read_all(fits.reply, Bound("a", 6)) == b"abcabc"
    with pytest.raises(UpstreamBroken, match="at most 5 are read"):
        await read_all(too_long.reply, Bound("a", 5))


async def test_a_broken_stream_ends_with_an_error_event() -> None:
    """It has a name, on a line of its own at any position where the pod stopped."""
    client = Client()
    client.start(200, [])
    client.put(b'data: {"choi')
    end_broken_stream(client, b'{"error": {"message": "gone"}}')
    last = b"".join(client.pieces).split(b"\n\n")[-2]
    name, data = last.split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {"error": {"message": "gone"}}
    assert client.finished


@pytest.mark.parametrize(
    ("content_type", "streams"),
    [(b"text/event-stream", True), (b"Text/Event-Stream ; charset=utf-8", True), (b"application/json", False)],
)
def test_the_content_type_marks_a_stream(content_type: bytes, streams: bool) -> None:
    """Not the request: an error response to a streamed request is not a stream."""
    assert (media_type({b"content-type": content_type}) == EVENT_STREAM) is streams
    assert not media_type({b"x-content-type": content_type})
