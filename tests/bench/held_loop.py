"""What holds the event loop: the CPU time of the largest inputs that one call reads, and the bound of each.

    python -m tests.bench.held_loop

Prints a table, and ends with 1 if an input takes longer than its bound. Times are those of the reference machine
(`tests/bench/pace.py`). CI runs it every night; `make test` has no bound of time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import TypeAlias

import msgspec

from router.config.pod_schema import KubernetesPods
from router.engines.prometheus import LoadGauges, read_load
from router.errors import ConfigError
from router.feeds.discovery.kube_api import KubePod, pod_reader, read_page
from router.feeds.discovery.kube_watch import PAGE
from router.feeds.discovery.pod_facts import NodePlace, pod_configs
from router.frontends.extproc.messages import ProcessingRequest
from router.frontends.extproc.metadata import POD_HEADER, addresses_in, peer_in, served_in
from router.index.events import UndecodableBatch, decode_events
from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue
from router.request.continuation.stream import Record, Recorder
from router.request.continuation.terms import terms_of
from router.types import Endpoint
from tests.bench.pace import Stopwatch

MOST_S = 0.005
LINEAR_S = 0.3
"""Many times what it takes. Where work grew with the square of the input, it was seconds."""
RUNS = 5
PIECE_BYTES = 64 * 1024
MESSAGE_BYTES = 320 * 1024
"""The largest message of a gateway without its body."""
IDS = 140_000
"""The longest prompt that is remembered."""
TERMS = terms_of(Endpoint.CHAT, b'{"messages":[],"stream":true}')
GAUGES = LoadGauges(running=("run",), waiting=("wait",), kv_usage=("usage",), rank_label="rank")


Calls: TypeAlias = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Case:
    """`start` returns the calls of one run, each of which may hold the loop for `most_s`."""

    name: str
    start: Callable[[], Calls]
    most_s: float = MOST_S

    def slowest_s(self) -> float:
        """The slowest call, in the fastest of several runs."""
        return min(max(map(_taken_s, self.start())) for _ in range(RUNS))


def _taken_s(call: Callable[[], object]) -> float:
    stopwatch = Stopwatch()
    with stopwatch:
        call()
    return stopwatch.least_s


def once(name: str, call: Callable[..., object], *given: object, most_s: float = MOST_S) -> Case:
    """A run of one call."""
    return Case(name, lambda: [partial(call, *given)], most_s)


def cases() -> Iterator[Case]:
    for name, line in METRIC_LINES.items():
        yield once(f"a line of metrics: {name}", read_metrics, line, most_s=LINEAR_S)
    for name, fill in FILLS.items():
        yield once(f"metadata of a gateway: {name}", read_metadata, message(fill))
    for name in ("engine", "role", "handoff", "pulls", "kv-events", "id", "zone"):
        yield once(f"an annotation of 250 KB: {name}", read_annotations, annotated(name))
    yield once("a page of pods with annotations of 80 KB", read_page, page_of_pods())
    for name in ("anything", "extra_keys", "token_ids", "medium"):
        yield once(f"a map whose keys have one hash: {name}", read_event, keys_of_one_hash(name), most_s=LINEAR_S)
    for name, ids in (("a million ids", 1_000_000), ("ids that are remembered", IDS)):
        yield Case(f"the prompt of a stream: {name}", partial(recorded, first_event(ids)))
    yield Case("the prompt of a continued stream", partial(joined, first_event(IDS)))


# --- metrics ---


METRIC_LINES = {
    "no quotes": b"{%b} 1" % (b"a=b," * 15_000),
    "one name": b"{%b} 1" % (b"a" * 60_000),
    "an open quote": b'{a="%b} 1' % (b"\\a" * 30_000),
    "commas": b"{%b} 1" % (b"," * 60_000),
}


def read_metrics(line: bytes) -> None:
    read_load(b"run%b\nrun 4\n" % line, GAUGES, None, 0.0)


# --- messages of a gateway ---


def _empty_attribute(of: ProcessingRequest) -> None:
    of.attributes.add()


def _empty_metadata(of: ProcessingRequest) -> None:
    of.metadata_context.filter_metadata.add()


def _address(of: ProcessingRequest) -> None:
    structs = of.metadata_context.filter_metadata
    struct = structs[0] if structs else structs.add(key=b"envoy.lb.subset_hint")
    fields = struct.value.fields
    hint = fields[0] if fields else fields.add(key=POD_HEADER + b"-subset")
    hint.value.list_value.values.add(string_value=b"a")


FILLS = {"empty attributes": _empty_attribute, "empty metadata": _empty_metadata, "addresses": _address}


def message(fill: Callable[[ProcessingRequest], None]) -> bytes:
    found = ProcessingRequest()
    while found.ByteSize() < MESSAGE_BYTES:
        for _ in range(1000):
            fill(found)
    return bytes(found.SerializeToString())


def read_metadata(data: bytes) -> None:
    found = ProcessingRequest.FromString(data)
    peer_in(found), addresses_in(found), served_in(found)


# --- pods in Kubernetes ---


def annotated(name: str) -> bytes:
    annotations = {f"warmroute.dev/{name}": "x" * 250_000}
    return msgspec.json.encode({"metadata": {"name": "a", "annotations": annotations}, "status": {"podIP": "h"}})


def read_annotations(pod: bytes) -> None:
    labels = dict(pod_reader(frozenset())(pod)[0].labels)
    kube = KubePod(key=("ns", "a"), uid="u", address="10.0.0.7", node="n1", labels=labels)
    with suppress(ConfigError):
        pod_configs(kube, KubernetesPods(selector="app=x"), NodePlace("z1", "r1"), "a")


def page_of_pods() -> bytes:
    notes = {"notes": "x" * 80_000}
    item = {"metadata": {"name": "a", "namespace": "ns", "uid": "1", "resourceVersion": "1", "annotations": notes}}
    return msgspec.json.encode({"metadata": {"resourceVersion": "1"}, "items": [item] * PAGE})


# --- KV events ---


def keys_of_one_hash(name: str, count: int = 10_000) -> bytes:
    """In Python, -1 and -2 have the same hash, and so have all tuples of them."""
    keys = (msgspec.msgpack.encode(key) for key in islice(product((-1, -2), repeat=16), count))
    found = b"\xdf" + count.to_bytes(4, "big") + b"".join(key + b"\xc0" for key in keys)
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "medium": "GPU",
        name: msgspec.Raw(found),
    }
    return msgspec.msgpack.encode([1.5, [event], 3])


def read_event(batch: bytes) -> None:
    with suppress(UndecodableBatch):
        tuple(decode_events(batch))


# --- streams ---


def first_event(ids: int) -> bytes:
    answer = b'"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    return b'data: {"id":"a","prompt_token_ids":[%b1],%b' % (b"123456," * (ids - 1), answer)


def recorded(sent: bytes) -> Calls:
    return feeds(Recorder(TERMS, asks_ids=True), sent)


def joined(sent: bytes) -> Calls:
    ids = b"123456," * (IDS - 1) + b"1"
    found = Continue(method="ids", body=b"", prompt=[123456] * (IDS - 1) + [1], sent=b"[%b]" % ids)
    return feeds(Joiner(TERMS, Record(), found, None), sent)


def feeds(reader: Recorder | Joiner, sent: bytes) -> Calls:
    pieces = [sent[begin : begin + PIECE_BYTES] for begin in range(0, len(sent), PIECE_BYTES)]
    return [partial(reader.feed, piece) for piece in pieces]


def main() -> int:
    """The exit status: 1 if one took too long."""
    is_slow = False
    for case in cases():
        taken_s = case.slowest_s()
        is_slow |= taken_s > case.most_s
        mark = "  TOO LONG" if taken_s > case.most_s else ""
        print(f"{case.name:50} {taken_s * 1000:7.2f} of {case.most_s * 1000:5.0f} ms{mark}")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
