"""Fuzzes KV events, metrics and the facts of joining pods: malformed answers are ignored."""

from __future__ import annotations

import base64
import json
import math
import re
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from router.engines.adapter import MODELS_PATH, parse_tokens
from router.engines.engine_catalog import ENGINES
from router.engines.prometheus import samples
from router.guards import OutOfBounds, OutOfRange
from router.hashing import hash_array, token_array
from router.index.blockmap import BlockMap
from router.index.events import U64, UndecodableBatch, parse_frames
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, Generation, KvEvent, PromptPrefix
from tests.fuzz.bodies import JSON
from tests.index.decoding import decode_batch
from tests.kit.scenes import make_pod

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"
GENERATION = Generation(model="m", block_size_tokens=2)
RANKS = (None, 0, 1)
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_by_name = itemgetter(0)
_TIER_NAMES = ("GPU", "CPU", "DISK", "REMOTE")


def events(data: bytes) -> None:
    """A KV event message: its last frame, or its last two frames, split at the eighth byte."""
    with suppress(UndecodableBatch):
        parse_frames((data[:8], data[8:]))
    with suppress(UndecodableBatch, OutOfBounds):
        events = decode_batch(data)
        _can_be_indexed(events)
        again = decode_batch(msgspec.msgpack.encode([0.0, [_written(event) for event in events]]))
        assert again == events, "written out it is another event"


def _can_be_indexed(events: tuple[KvEvent, ...]) -> None:
    """It can be applied and removed with its holder."""
    blocks = BlockMap()
    blocks.add_holder("pod", GENERATION)
    for event in events:
        if isinstance(event, BlocksStored):
            assert event.block_size_tokens >= 0
            assert len(event.tokens) == event.block_size_tokens * len(event.block_hashes)
        if not isinstance(event, BlocksCleared):
            assert all(0 <= block <= U64 for block in event.block_hashes)
        blocks.apply("pod", event)
    blocks.match(PromptPrefix(GENERATION, token_array(), hash_array([1, 2])))
    blocks.forget("pod")
    assert blocks.block_holders == 0


def _written(event: KvEvent) -> dict[str, Any]:
    """The event in the engine's full form."""
    if isinstance(event, BlocksCleared):
        return {"type": "AllBlocksCleared"}
    fields = {"block_hashes": event.block_hashes, "medium": _TIER_NAMES[event.tier], "group_idx": event.group}
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", **fields}
    tokens, size = event.tokens, event.block_size_tokens
    fields |= {"parent_block_hash": event.parent_hash, "token_ids": list(tokens), "block_size": size}
    return {"type": "BlockStored", **fields, "lora_name": event.adapter, "cache_salt": event.salt}


def metrics(data: bytes) -> None:
    """A page of metrics, for every engine and rank. Samples that Prometheus' lenient client reads there have the same
    values when they are written properly and in groups."""
    for engine in ENGINES.values():
        for rank in RANKS:
            with suppress(OutOfBounds, OutOfRange):
                load = engine.parse_load(data, rank, 1.0)
                assert load is None or (load.running >= 0 and load.waiting >= 0 and 0 <= load.kv_usage <= 1)
    _facts({MODELS_PATH: b'{"data": [{"id": "m"}]}', "/metrics": data})
    with suppress(ValueError, LookupError, OverflowError):  # how the client reports a malformed page
        read = [each for family in text_string_to_metric_families(data.decode()) for each in family.samples]
        fields = sorted([(each.name, float(each.value)) for each in read if _NAME.fullmatch(each.name)], key=_by_name)
        page = "".join(f"{name} {value!r}\n" for name, value in fields).encode()
        for name in {name for name, _ in fields}:
            found = [sample.value for sample in samples(page, name)]
            assert found == [value for other, value in fields if other == name and math.isfinite(value)]


def facts(data: bytes) -> None:
    """A response of a pod that joins."""
    parse_tokens(data)
    for path in {path for engine in ENGINES.values() for path in engine.describe_paths}:
        _facts({MODELS_PATH: b'{"data": [{"id": "m"}]}', path: data})


def _facts(answers: dict[str, bytes]) -> None:
    for name, engine in ENGINES.items():
        for rank in RANKS:
            pod = make_pod(url="http://[::1]:8000", engine=name, dp_rank=rank)
            fields = None
            with suppress(OutOfBounds):
                fields = engine.describe(answers, pod)
            if fields is not None:
                sizes = fields.max_model_len_tokens, fields.block_size_tokens, fields.capacity_tokens
                assert all(size is None or size > 0 for size in sizes), fields
                msgspec.json.encode(fields)


def _golden(name: str) -> bytes:
    return (GOLDENS / name).read_bytes()


def _recorded_events() -> list[bytes]:
    """The shortest messages of each kind that a real vLLM sent."""
    lines = map(json.loads, _golden("vllm_events.jsonl").splitlines())
    sent = {base64.b64decode(line["frames"][-1]) for line in lines if line["kind"] == "event"}
    return sorted(sent, key=len)[:6]


def _load_lines(name: str) -> bytes:
    """The lines of a page that the router reads, with comments."""
    wanted = (b"num_requests", b"cache_usage", b"cache_config", b"requests_processing", b"requests_deferred")
    return b"\n".join(line for line in _golden(name).splitlines() if any(word in line for word in wanted)) + b"\n"


_ARRAYS = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, 3, "CPU", "lora", [["salt"], None], 0, "full_attention"]
EVENTS = (
    *_recorded_events(),
    msgspec.msgpack.encode([1.0, [_ARRAYS, ["BlockRemoved", [-1, b"digest"], None], ["AllBlocksCleared"]], 1]),
    msgspec.msgpack.encode({"events": [{"type": "BlockRemoved", "block_hashes": [2**64 - 1], "locality": "REMOTE"}]}),
)
EVENT_WORDS = (
    *(msgspec.msgpack.encode(word) for word in (*_TIER_NAMES, "BlockStored", "BlockRemoved", "AllBlocksCleared")),
    *(msgspec.msgpack.encode(word) for word in ("block_hashes", "token_ids", "block_size", "extra_keys", "type")),
    *(b"\x90", b"\x91", b"\x80", b"\xc0", b"\xc2", b"\xcb", b"\xcf", b"\xd3", b"\xdd", b"\xc4", b"\xd6\xff", b"\xff"),
)
METRICS = (
    _load_lines("vllm_metrics.txt"),
    _load_lines("llamacpp_metrics.txt"),
    b'vllm:num_requests_running{engine="0",x="a\\"}\\\\b"} 3.0\nvllm:num_requests_running{engine="1"} 1e308\n'
    b'vllm:num_requests_running{engine="2"} 1e308\nsglang:token_usage{dp_rank="0"} NaN\nsglang:token_usage 0.5 123\n',
    b'vllm:num_requests_running 1\nvllm:cache_config_info{block_size="16",num_gpu_blocks="999"} 1.0\n',
)
METRIC_WORDS = (
    *(
        name.encode()
        for engine in ENGINES.values()
        for gauge in ("running", "waiting", "kv_usage")
        for name in getattr(engine.gauges, gauge)
    ),
    *(
        b'{engine="0"} ',
        b'{dp_rank="1"} ',
        b"1e308",
        b"+Inf",
        b"NaN",
        b"-1",
        b"\n",
        b"# TYPE ",
        b" 1.0\n",
        b'\\"',
        b"_1",
    ),
    *(b'block_size="', b'hash_block_size="', b'num_gpu_blocks="', b'kv_cache_size_tokens="', "٣".encode()),
)
FACTS = (
    _golden("vllm_models.json"),
    _golden("vllm_kv_event_sources.json"),
    _golden("llamacpp_tokenize.json"),
    b'{"version": "0.32.0"}',
    b'{"default_generation_settings": {"n_ctx": 4096}, "total_slots": 2}',
    b'{"page_size": 16, "max_total_num_tokens": 1000, "dp_size": 2, "kv_events": {"publisher": "zmq",'
    b' "endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5558, "block_size": 16}}',
    b'{"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558"}}',
    b'{"data": [{"id": "m", "max_model_len": 4096}, {"id": "l", "parent": "m", "meta": {"n_ctx": 1}}]}',
)
FACT_WORDS = (*JSON, *(b'"%b":' % name for name in (b"max_model_len", b"n_ctx", b"page_size", b"total_slots", b"data")))
