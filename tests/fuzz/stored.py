"""Fuzzes what routers read from Redis: rows, log entries and calibration. Accepted values must be usable."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import msgspec

from router.hashing import hash_array
from router.index.cluster import ClusterIndex, EntryKind, LogEntry
from router.index.holders import HolderFacts
from router.policy.calibration import Calibration, UnreadableCalibration
from router.policy.prefill_clock import PrefillObservation, TransferObservation
from router.stores.redis_schema import (
    Unreadable,
    decode_entry,
    decode_generation,
    decode_row,
    encode_generation,
    pack_blocks,
    scope_of,
)
from router.types import Generation, Link, PodSpeed, PromptPrefix
from tests.fuzz.bodies import JSON

GENERATION = Generation(model="m", block_size_tokens=16)
SPEED, LINK = PodSpeed(5, 0.1, 1e-6), Link(1.0, 1e6, "rdma")


def rows(data: bytes) -> None:
    """Fields of a hash or a stream entry, one NAME=VALUE per line; or a member of `scopes`."""
    fields = dict(line.partition(b"=")[::2] for line in data.split(b"\n"))
    with suppress(Unreadable):
        row = decode_row(fields)
        assert math.isfinite(row.beat_s)
        assert msgspec.json.decode(msgspec.json.encode(row.facts), type=type(row.facts)) == row.facts
    with suppress(Unreadable):
        _is_taken(decode_entry(fields))
    with suppress(Unreadable):
        generation = decode_generation(data)
        assert decode_generation(encode_generation(generation)) == replace(generation, adapter="", salt="")
        assert len(scope_of(generation)) == 16


def _is_taken(entry: LogEntry) -> None:
    """Apply it to an empty index and to one with its holder; nothing remains after the holder is removed."""
    index = ClusterIndex(holder_ttl_s=10)
    begin = LogEntry(kind=EntryKind.EMPTY, holder=entry.holder, epoch=entry.epoch, facts=HolderFacts())
    for now_s, each in enumerate((entry, begin, replace(entry, seq=1), entry, replace(entry, seq=2))):
        index.apply(GENERATION, each, float(now_s))
        index.match(PromptPrefix(GENERATION, (), hash_array([1, 2])))
    index.expire(100.0)
    assert index.masks.block_holders == 0


def calibrations(data: bytes) -> None:
    """The calibration of another router."""
    calibration = Calibration()
    with suppress(UnreadableCalibration):
        calibration.load(data)
        known = msgspec.msgpack.decode(calibration.dump())
        for key in (*known["classes"], "class"):
            calibration.observe_prefill(key, "pod", SPEED, PrefillObservation(1, 1000, 1_000_000, 300.0))
            assert all(math.isfinite(c) and c >= 0 for c in _coefficients(calibration.speed(key, "pod", SPEED)))
        for kind in (*known["links"], "rdma"):
            calibration.observe_transfer(kind, LINK, TransferObservation(1_000_000, 0, 5.0))
            link = calibration.link(kind, LINK)
            assert math.isfinite(link.t0_ms) and 0 < link.bytes_per_ms < math.inf
        assert all(math.isfinite(row.value) for row in calibration.rows())
    again = Calibration()
    again.load(calibration.dump())
    assert msgspec.msgpack.decode(again.dump()) == msgspec.msgpack.decode(calibration.dump())


def _coefficients(speed: PodSpeed) -> tuple[float, ...]:
    return tuple(getattr(speed, name) for name in PodSpeed.__dataclass_fields__)


def _learnt() -> bytes:
    calibration = Calibration()
    for step in range(1, 4):
        calibration.observe_prefill("class", "pod", SPEED, PrefillObservation(1, 1000, 1_000_000, 100.0 * step))
        calibration.observe_transfer("rdma", LINK, TransferObservation(1_000_000, 0, 5.0 * step))
    return calibration.dump()


_FACTS = b'{"url": "http://pod:8000", "rank": -1, "reach": "*"}'
ROWS = (
    b"epoch=7\nseq=3\ncomplete=1\nowner=abc\nbeat=1500\nn0=1\nn1=0\nn2=0\nn3=0\nfacts=" + _FACTS,
    b"k=change\nh=pod\ne=7\ns=3\nc=0\n+0=" + pack_blocks([1, 2]) + b"\n-2=" + b"\0" * 8,
    b"k=empty\nh=pod\ne=7\ns=0\nf=" + _FACTS,
    b"k=reload\nh=pod\ne=7\ns=0\nf=" + _FACTS + b"\n+1=" + pack_blocks([1]),
    encode_generation(replace(GENERATION, revision="r")),
)
ROW_WORDS = (
    *JSON,
    *(b"\n%b=" % name for name in (b"k", b"h", b"e", b"s", b"c", b"f", b"+0", b"-0", b"+3", b"epoch", b"seq", b"beat")),
    *(b"change", b"empty", b"reload", b"seal", b"beat", b"gone", b"99999999999999999999", b"1" * 310, b"-1", b"\xff"),
)
CALIBRATIONS = (_learnt(), Calibration().dump())
CALIBRATION_WORDS = (
    b"\xcb\x7f\xf0",
    b"\xcb\x7f\xf8",
    b"\xcb\x00\x00",
    b"\xc0",
    b"\x90",
    b"\x80",
    b"\xca",
    b"\xcf",
    b"\xff",
)
