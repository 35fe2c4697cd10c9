"""Publishes KV events over ZMQ as vLLM does.

PUB frames are `[topic, sequence, batch]`; a ROUTER socket replays the most recent batches
(docs/engines.md#kv-events).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from loadtest.mock_engine.faults import FaultBoard, FaultKind
from loadtest.mock_engine.mock_config import EventEncoding, KvEventConfig
from router.addresses import join_address
from router.types import AttentionKind, BlocksRemoved, BlocksStored, KvEvent

SEND_HIGH_WATER_MARK = 100_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def encode_batch(events: Iterable[KvEvent], encoding: EventEncoding, at_s: float) -> bytes:
    """`[time, events, rank 0]` in msgpack. An event is a map with a `type`, or a tagged array as before vLLM 0.24."""
    maps = [_as_map(event) for event in events]
    return msgspec.msgpack.encode([at_s, maps if encoding == "map" else [_as_array(m) for m in maps], 0])


def _as_map(event: KvEvent) -> dict[str, Any]:
    if isinstance(event, BlocksStored):
        return {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_hash,
            "token_ids": event.tokens,
            "block_size": event.block_size_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": event.adapter or None,
            "extra_keys": _extra_keys(event),
            "group_idx": event.group,
            "kv_cache_spec_kind": _KINDS[event.layers.kind if event.layers else AttentionKind.FULL],
            **({_WINDOW: event.layers.span_tokens} if event.layers and event.layers.span_tokens else {}),
            **({"lookahead_token_ids": event.lookahead_tokens} if event.lookahead_tokens else {}),
        }
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": "GPU", "group_idx": event.group}
    return {"type": "AllBlocksCleared"}


_WINDOW = "kv_cache_spec_sliding_window"
_KINDS = {
    AttentionKind.FULL: "full_attention",
    AttentionKind.WINDOW: "sliding_window",
    AttentionKind.STATE: "mamba",
}


def _as_array(event: dict[str, Any]) -> list[Any]:
    """The values of the map in its order. A BlockStored has the width of its window in any case."""
    return list((event | {_WINDOW: event.get(_WINDOW)} if event["type"] == "BlockStored" else event).values())


def _extra_keys(event: BlocksStored) -> list[list[str] | None] | None:
    """Hash inputs beyond tokens: the adapter in every block, the salt in the first block of a chain."""
    rest = [event.adapter] if event.adapter else []
    first = [*rest, event.salt] if event.salt else rest
    return [(first if at == 0 else rest) or None for at in range(len(event.block_hashes))] or None


class KvPublisher:
    """The event sockets of one engine epoch; the sequence starts at 0.

    The constructor needs a running loop, binds the sockets and raises `zmq.ZMQError` where a port is in use.
    """

    def __init__(self, config: KvEventConfig, host: str, faults: FaultBoard) -> None:
        self._config = config
        self._faults = faults
        self._sequence = 0
        self.event_count = 0
        """Events published in this epoch."""
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(SEND_HIGH_WATER_MARK)
        self._router = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        self._router.set_hwm(2 * (config.buffer_steps + 1))
        self._replay_task = asyncio.get_running_loop().create_task(self._answer_replays())
        try:
            self.endpoint = _bind(self._pub, host, config.port)
            self.replay_endpoint = _bind(self._router, host, config.replay_port)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def source(self) -> dict[str, Any]:
        """This rank's entry in `GET /kv_event_sources`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._config.buffer_steps,
            "hwm": SEND_HIGH_WATER_MARK,
            "max_queue_size": SEND_HIGH_WATER_MARK,
            "topic": "",
        }

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch, or drop it after `close`. ZMQ drops it for a slow subscriber, as with vLLM."""
        if self._pub.closed:
            return
        self.event_count += len(events)
        payload = encode_batch(events, self._config.encoding, time.time())
        sequence, self._sequence = self._sequence, self._sequence + 1
        lost = self._faults.take(FaultKind.LOSE_EVENTS)
        if lost is None or lost.replayable:
            self._buffer.append((sequence, payload))
        if lost is None:
            self._pub.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """Close the sockets. The ports are free on return."""
        self._replay_task.cancel()
        self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    async def _answer_replays(self) -> None:
        """Answer each request with the batches from its sequence on and an end marker; ignore malformed ones."""
        router = self._router
        topic = [b""] if self._config.encoding == "map" else []
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1]:
                continue
            start = int.from_bytes(frames[2], "big")
            for sequence, payload in [item for item in self._buffer if item[0] >= start]:
                await router.send_multipart([frames[0], b"", *topic, sequence.to_bytes(8, "big"), payload])
            await router.send_multipart([frames[0], b"", *topic, END_OF_REPLAY, b""])


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.bind(f"tcp://{join_address(host, port)}")
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
