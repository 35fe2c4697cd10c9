"""`warmroute compare` simulates policies on recorded traffic, next to what was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from router.observe.ended import Ended, RecordedDecision
from router.observe.receipts import ReceiptWriter
from router.policy.decide import decide
from router.policy.recording import record
from router.types import Generation, PodSpeed, PromptPrefix
from tests.kit.command_line import Typed
from tests.kit.scenes import POLICIES, pod, ready, request, scene

BY, BLOCK, BLOCKS = POLICIES["cost_aware"], 16, 128
SPEED = PodSpeed(2.0, 0.1, 1e-6, 8.0, 0.02, 1e-5)
DOCUMENTS, REQUESTS = 3, 60


@pytest.fixture
def receipts(tmp_path: Path) -> Path:
    """Three documents in turn, each at its own of two pods: all are cached from the fourth request on."""
    lines: list[bytes] = []
    writer = ReceiptWriter(lines.append)
    pods = [pod(name, speed=SPEED, capacity_tokens=5 * BLOCKS * BLOCK, block_size_tokens=BLOCK) for name in "ab"]
    for number in range(REQUESTS):
        document = number % DOCUMENTS
        hashes = [(document + 1) << 20 | at for at in range(BLOCKS)]
        prefix = PromptPrefix(Generation(model="m", block_size_tokens=BLOCK), range(BLOCKS * BLOCK + 9), hashes)
        seen = scene(*ready(*pods), request=request(f"r{number}"), prompt=prefix)
        decision = decide(seen, BY)
        served = next(one for one in decision.candidates if one.pod.id == "ab"[document // 2])
        cached_tokens = BLOCKS * BLOCK if number >= DOCUMENTS else 0
        ended = Ended(
            id=f"r{number}",
            at_s=float(number),
            model="m",
            endpoint="chat",
            result="ok",
            served=served,
            prompt_tokens=BLOCKS * BLOCK + 9,
            output_tokens=4,
            cached_tokens=cached_tokens,
            ttft_ms=SPEED.prefill_ms(BLOCKS * BLOCK + 9, cached_tokens) + 1.0,
            decision=RecordedDecision.of(record(seen), decision, BY, 0.0),
        )
        writer.write(ended, prefix)
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_policies_are_simulated_on_the_recorded_arrivals_and_pods(typed: Typed, receipts: Path) -> None:
    """Placed by prefix each document is computed once, in turn on both pods. What was recorded stands first."""
    ended = typed("compare", receipts, "--json", "--seeds", 2, "--jobs", 1)
    assert ended.code == 0, ended.err
    recorded, *simulated = json.loads(ended.out)
    rows = {row["policy"]: row for row in simulated}
    assert set(rows) == {"round_robin", "least_load", "cost_aware"}
    assert recorded["policy"] == "recorded: cost_aware"
    assert recorded["cached_share"] == pytest.approx((REQUESTS - DOCUMENTS) / REQUESTS, abs=0.01)
    assert rows["cost_aware"]["cached_share"] == pytest.approx(recorded["cached_share"], abs=0.03)
    assert rows["round_robin"]["cached_share"] == pytest.approx((REQUESTS - 2 * DOCUMENTS) / REQUESTS, abs=0.01)
    assert rows["cost_aware"]["ttft_mean_ms"] == pytest.approx(recorded["ttft_mean_ms"], rel=0.1)
    assert rows["cost_aware"]["prefill_s"] == pytest.approx(recorded["prefill_s"], rel=0.1)


def test_the_table_says_what_was_measured_and_how_far_to_trust_it(typed: Typed, receipts: Path) -> None:
    ended = typed("compare", receipts, "--policy", "round_robin", "--seeds", 1)
    assert ended.code == 0, ended.err
    assert "60 recorded requests of m on 2 pods" in ended.out and "recorded: cost_aware" in ended.out
    assert "what was measured" in ended.out and "least_load" not in ended.out


def test_the_fleet_that_most_requests_saw_is_simulated(typed: Typed, receipts: Path) -> None:
    """A drain at the end, and a small sample, are named."""
    fleet, *rest = receipts.read_bytes().splitlines()
    name = json.loads(fleet)["fleet"].encode()
    drained = fleet.replace(name, b"drained").replace(b'"ready"', b'"draining"', 1)
    receipts.write_bytes(b"\n".join((fleet, *rest[:-1], drained, rest[-1].replace(name, b"drained"))) + b"\n")
    shown = " ".join(typed("compare", receipts, "--policy", "round_robin", "--seeds", 1).out.split())
    assert "60 recorded requests of m on 2 pods" in shown
    assert "Requests that saw 1 pod ready: 1. They are simulated on the 2 pods that most saw." in shown
    assert "Trust no row: 60 requests are a small sample; record at least 200." in shown


def test_a_simulation_far_from_what_was_recorded_is_named(typed: Typed, receipts: Path) -> None:
    """By the cached share of the policy that decided. With --json on stderr."""
    text = receipts.read_text()
    receipts.write_text(re.sub(r'"cached_tokens":2048,"ttft_ms"', '"cached_tokens":1024,"ttft_ms"', text))
    ended = typed("compare", receipts, "--json", "--seeds", 1, "--jobs", 1)
    assert json.loads(ended.out) and "Trust no row: 47" in ended.err and "% when simulated" in ended.err


def test_receipts_without_pods_or_answers_say_what_to_do(typed: Typed, receipts: Path) -> None:
    fleet, *rest = receipts.read_bytes().splitlines()
    receipts.write_bytes(b"\n".join(rest) + b"\n")
    assert "no pods of the model m; enable receipts.replay_data" in typed("compare", receipts).err
    receipts.write_bytes(fleet + b"\n")
    ended = typed("compare", receipts)
    assert ended.code == 2 and "no answers with a first token and usage" in ended.err


def test_an_unknown_policy_is_reported_with_the_known_ones(typed: Typed, receipts: Path) -> None:
    ended = typed("compare", receipts, "--policy", "cheapest")
    assert ended.code == 2 and "unknown policy 'cheapest'" in ended.err and "round_robin" in ended.err
