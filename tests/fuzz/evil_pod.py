"""Fuzzes all that a pod sends while it joins, serves and leaves, in a fleet with a good pod of the same model.

An input is a list of parts between `MARK`. The first byte of a part names the connection that it is for: a page
(`PAGES`), a KV event message, or the answer to a replay. A page that begins with `HTTP/` is the whole response. Pages
that the input does not have are those of a healthy pod.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cache

import msgspec
import zmq
import zmq.asyncio

from router.config.pod_schema import KvEvents, PodConfig
from router.types import PodState
from tests.fuzz.town import DEADLINE_S, REPEATED, Town, expanded, play
from tests.kit.scenes import LLAMA_8B

MARK = b"\xff\xfd"
EVENT, REPLAY = b"e", b"r"
MAX_PARTS = 32
JOINED_S, SERVED_S = 0.4, 0.2
"""The pod leaves after these times, even if it was never ready, and its load was never read again."""
CHATS = 4
_GAUGE = b'vllm:%b{engine="0",model_name="demo"} %b\n'
_METRICS = (
    _GAUGE % (b"num_requests_running", b"0")
    + _GAUGE % (b"num_requests_waiting", b"0")
    + _GAUGE % (b"kv_cache_usage_perc", b"0.1")
    + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",engine="0"} 1.0\n'
)
_CHAT = (
    b'{"id":"x","object":"chat.completion","model":"demo","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
PAGES: Mapping[bytes, tuple[bytes, bytes]] = {
    b"h": (b"/health", b""),
    b"m": (b"/metrics", _METRICS),
    b"l": (b"/v1/models", b'{"object":"list","data":[{"id":"demo","object":"model","max_model_len":8192}]}'),
    b"v": (b"/version", b'{"version":"0.32.0"}'),
    b"s": (b"/server_info", b"{}"),
    b"k": (b"/kv_event_sources", b"{}"),
    b"t": (b"/tokenize", b'{"count":3,"max_model_len":8192,"tokens":[1,2,3]}'),
    b"c": (b"/v1/chat/completions", _CHAT),
}


class EvilPod:
    """Answers with what an input has for each path, and publishes its KV event messages."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.read: list[bytes] = []
        """Paths of the loads that the router has read."""
        self.events: Sequence[bytes] = ()
        self.replays: Sequence[bytes] = ()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or b"0"))
            path = head.split(b" ", 2)[1].partition(b"?")[0]
            if path == b"/metrics":
                self.read.append(path)
            page = self.pages.get(path, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            head = b"" if page.startswith(b"HTTP/") else b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page)
            writer.write(head + page)
            await writer.drain()
        writer.close()

    async def publish(self, socket: zmq.asyncio.Socket) -> None:
        """Send all messages to each subscriber."""
        while True:
            if (await socket.recv()).startswith(b"\x01"):
                for message in self.events:
                    await socket.send_multipart([b"", message[:8].rjust(8, b"\0"), message[8:]])

    async def replay(self, socket: zmq.asyncio.Socket) -> None:
        """Answer each request with all messages, and an end."""
        while True:
            peer, *_ = await socket.recv_multipart()
            for message in self.replays:
                await socket.send_multipart([peer, b"", message[:8].rjust(8, b"\0"), message[8:]])
            await socket.send_multipart([peer, b"", struct.pack(">q", -1), b""])


@cache
def _pod(_town: int) -> tuple[EvilPod, asyncio.Future[PodConfig]]:
    """The pod of this process, and where it listens once it does."""
    pod, config = EvilPod(), asyncio.get_running_loop().create_future()
    staying = asyncio.get_running_loop().create_task(_stay(pod, config))
    staying.add_done_callback(lambda task: task.cancelled() or task.result())
    return pod, config


async def _stay(pod: EvilPod, config: asyncio.Future[PodConfig]) -> None:
    context = zmq.asyncio.Context()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await asyncio.start_server(pod.serve, "127.0.0.1", 0, limit=1 << 24))
        events = stack.enter_context(context.socket(zmq.XPUB))
        events.setsockopt(zmq.XPUB_VERBOSE, 1)
        replays = stack.enter_context(context.socket(zmq.ROUTER))
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (events, replays)]
        endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sources = KvEvents(endpoint=endpoints[0], replay_endpoint=endpoints[1])
        config.set_result(PodConfig(url=url, speed=LLAMA_8B, kv_events=sources))
        await asyncio.gather(pod.publish(events), pod.replay(replays))


async def _join_and_leave(town: Town, parts: Mapping[bytes, Sequence[bytes]]) -> None:
    """The pod joins with these parts, chats are sent, and it leaves. A chat that the good pod answered must have
    succeeded; one that no pod answered was not retried."""
    pod, started = _pod(id(town))
    config = await started
    pod.pages = {path: parts[name][-1] if name in parts else page for name, (path, page) in PAGES.items()}
    pod.events, pod.replays = parts[EVENT], parts[REPLAY]
    membership = town.program.pods.membership
    membership.add(config)
    evil = config.ids[0]
    try:
        await _chat(town, JOINED_S, lambda: _is_ready(town, evil))
        answers = await asyncio.gather(*[town.good(f"chat {number}") for number in range(CHATS)])
        for status, answered in answers:
            assert status == 200 or answered == evil, f"a good chat got {status} from {answered or 'no pod'}"
        known = len(pod.read)
        await _chat(town, SERVED_S, lambda: len(pod.read) > known + 1)
        assert _is_ready(town, town.engine.url.removeprefix("http://")), "the good pod was ejected"
    finally:
        membership.remove(evil)
    await _chat(town, DEADLINE_S, lambda: town.program.fleet.status(evil) is None)
    status, answered = await town.good("afterwards")
    assert status == 200, f"a good chat got {status} from {answered or 'no pod'} after the pod had left"


def _is_ready(town: Town, pod: str) -> bool:
    status = town.program.fleet.status(pod)
    return status is not None and status.state is PodState.READY


async def _chat(town: Town, seconds: float, holds: Callable[[], bool]) -> None:
    """Send one chat after the other until it holds, but no longer. After 0.4 idle seconds a chat's callbacks take ten
    times as long: what they touch has left the caches of the CPU."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not holds():
                await town.good("meanwhile")


def pods(data: bytes) -> None:
    """What one pod sends on all of its connections."""
    parts: dict[bytes, list[bytes]] = defaultdict(list)
    for part in data.split(MARK)[:MAX_PARTS]:
        parts[part[:1]].append(expanded(part[1:]))
    play(lambda town: _join_and_leave(town, parts))


def _event(sequence: int, *events: object) -> bytes:
    return EVENT + struct.pack(">Q", sequence) + msgspec.msgpack.encode([1.0, list(events)])


_STORED = ["BlockStored", [1, 2], None, list(range(32)), 16, None, "GPU"]
_MANY = REPEATED + b'vllm:lora_requests_info{running_lora_adapters="%b"} 1\n' % (b"a," * 100) + REPEATED
PODS = (
    b"h",
    b"m" + _METRICS,
    b"m"
    + _METRICS.replace(b"} 0\n", b"} 1e308\n")
    + _GAUGE.replace(b'"0"', b'"1"') % (b"num_requests_waiting", b"1e308"),
    b"m" + _METRICS + b'vllm:num_requests_waiting{engine="0' + REPEATED + b"\\" * 200 + REPEATED,
    b"m" + _METRICS + b"vllm:num_requests_waiting{" + REPEATED + b"model_name=a," * 10 + REPEATED + b"} 1\n",
    b"m" + _METRICS + _MANY,
    b"m" + _METRICS + REPEATED + (_GAUGE % (b"num_requests_waiting", b"1")) * 40 + REPEATED,
    b"lHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + REPEATED + b"x: y\r\n" * 50 + REPEATED,
    b'l{"data":[{"id":"demo"}' + REPEATED + b',{"id":"x","parent":"demo"}' * 8 + REPEATED + b"]}",
    b"l" + msgspec.json.encode({"data": [{"id": f"model-{number}", "parent": "demo"} for number in range(60)]}),
    b"l" + REPEATED + b"[" * 100 + REPEATED,
    b'v{"version":"' + REPEATED + b"9" * 400 + REPEATED + b'"}',
    b't{"count":400000,"max_model_len":1,"tokens":[]}',
    b't{"count":3,"tokens":[' + REPEATED + b"1," * 200 + REPEATED + b"1]}",
    b'c{"id":"x","choices":[],"usage":{"prompt_tokens":999999999,"completion_tokens":999999999}}',
    b"cHTTP/1.1 200 OK\r\ncontent-length: 7\r\ncontent-length: 9\r\n\r\nxxx",
    b"cHTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
    b"cHTTP/1.1 200 OK\r\n" + REPEATED + b"x: y\r\n" * 20 + REPEATED + b"\r\n",
    b'k{"endpoint":"ipc:///tmp/*","publisher":"zmq","enable_kv_cache_events":true}' + MARK + b's{"endpoint_host":"*"}',
    MARK.join([_event(0, _STORED), _event(1, ["BlockRemoved", [1], "GPU"]), _event(2, ["AllBlocksCleared"])]),
    MARK.join([_event(5, _STORED), REPLAY + _event(0, _STORED)[1:], REPLAY + _event(9, _STORED)[1:]]),
    _event(0, *[["BlockRemoved", [number], "GPU"] for number in range(200)]),
    EVENT
    + bytes(8)
    + b"\x92\x01\xdd\x00\x00\x64\x00"
    + REPEATED
    + b"\x93\xacBlockRemoved\x91\x01\xa3GPU" * 100
    + REPEATED,
    EVENT + bytes(8) + REPEATED + b"\x91" * 1000 + REPEATED,
)
POD_WORDS = (
    *(MARK + name for name in (*PAGES, EVENT, REPLAY)),
    *(
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 503 ",
        b"content-length: ",
        b"transfer-encoding: chunked\r\n\r\n",
        b"\r\n\r\n",
    ),
    *(
        b"vllm:num_requests_waiting",
        b'{engine="',
        b"} 1e308\n",
        b"NaN",
        b'"max_model_len":',
        b'"id":"demo"',
        b'"parent":',
    ),
    *(b'"endpoint":"tcp://', b'"tokens":[', b'"usage":{', b'"completion_tokens":', b"data: ", b"\n\n", b"BlockStored"),
)
