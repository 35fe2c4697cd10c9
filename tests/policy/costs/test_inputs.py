"""Every cost can be recomputed from the inputs and parameters that an explanation shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.errors import RouterError
from router.policy.catalog import COSTS
from router.policy.decide import decide
from router.policy.explain import ON_DECODE_POD, explain, priced
from router.policy.term import CostTerm, Side, Transfer
from router.types import InFlight, Link, Links, PodLoad, Role, Scene
from tests.kit.scenes import links, pod, policy, scenes
from tests.policy.costs.placements import at

Inputs = Mapping[str, float]
ALL = policy(
    costs={**{name: {} for name in COSTS}, "eviction": {"congestion": 1.0, "learnt": 0.5}, "decode": {"pace": 0.3}},
    shortlist=0,
)


def compute_ms(x: Inputs, n: float, p: float) -> float:
    return x["c1"] * (n - p) + x["c2"] * (n * n - p * p)


def work_ahead_ms(x: Inputs) -> float:
    rest_ms = x["F"] + x["W_in"] - x["time since step began"] if "time since step began" in x else 0.0
    return max(0.0, rest_ms) + x["W_behind"]


def link_ms(x: Inputs, name: str, tokens: float) -> float:
    return x[f"{name} t0"] + tokens * x["kv_bytes_per_token"] / (x[f"{name} B"] * 1e6)


def transfer_ms(x: Inputs, name: str) -> float:
    return link_ms(x, name, x[f"{name} tokens"] * (1 + x[f"{name} concurrent"]))


def queue(x: Inputs, term: Any) -> float:
    foreign = max(x["waiting at engine"] - x["our prompts then"], 0)
    return work_ahead_ms(x) + (foreign * (x["c0"] + compute_ms(x, term.foreign_request_tokens, 0)) if foreign else 0.0)


def prefill(x: Inputs, term: Any) -> float:
    return x["F"] + compute_ms(x, x["n"], x["p"]) + x["c1"] * x.get("e", 0)


def hot_prefix_credit(x: Inputs, term: Any) -> float:
    return -float(term.credit) * compute_ms(x, max(x["p"], x["shared"]), x["p"])


def tier_read(x: Inputs, term: Any) -> float:
    tiers = [tier for tier in ("cpu tier", "disk tier", "remote tier") if f"{tier} tokens" in x]
    return sum(link_ms(x, tier, x[f"{tier} tokens"]) for tier in tiers)


def transfer(x: Inputs, term: Any) -> float:
    return max(0.0, transfer_ms(x, "pull") - work_ahead_ms(x)) if "pull tokens" in x else 0.0


def handoff(x: Inputs, term: Any) -> float:
    if "handoff tokens" not in x:
        return 0.0
    moving_ms = transfer_ms(x, "handoff") - x["handoff t0"]
    return float(transfer_ms(x, "handoff") - min(moving_ms, x["T_prefill"]) * (term.layers - 1) / term.layers)


def decode(x: Inputs, term: Any) -> float:
    step_ms = x["d1"] * x["requests decoding"] + x["d2"] * x["context in flight"]
    pace_ms = x["d0"] / max(1 - x["busy when as fast"], 0.05) if "busy when as fast" in x else 0.0
    return float(x["expected output"] * (term.weight * step_ms + term.pace * pace_ms))


def kv_wait(x: Inputs, term: Any) -> float:
    if "KV in use" not in x:
        return 0.0
    used = x["KV in use"] * x["KV capacity"]
    short = (
        used + x.get("context waiting", 0) + x["prompts before it"] + x["n"] + x["expected output"] - x["KV capacity"]
    )
    step_ms = x["d0"] + x["d1"] * max(x["requests decoding"], 1) + x["d2"] * used
    return float(term.weight * max(short, 0) / max(used, 1) * x["expected output"] * step_ms)


def held_kv(x: Inputs, term: Any) -> float:
    held = x.get("held", 0)  # by prefill pods alone
    return float(term.weight * max(held + x["n"] - x["KV capacity"], 0) / held * 1000 * term.lease_s) if held else 0.0


def lent_prefill(x: Inputs, term: Any) -> float:
    if "prompts here" not in x:
        return 0.0
    return float(term.weight * x["expected output"] * x["d0"] / 1000 * x["prompts here"] * (x["d0"] + x["d1"]))


def kv_pressure(x: Inputs, term: Any) -> float:
    if "KV in use" not in x:
        return 0.0
    at_engine = x["requests at engine"]
    used = x["KV in use"] * (max(1, x["our requests"] / at_engine) if at_engine else 1)
    used = min(used + x["prompts before it"] / x["KV capacity"], 0.95)
    return float(term.weight * x["c1"] * (x["n"] + x["expected output"]) * used / (1 - used))


def decode_interference(x: Inputs, term: Any) -> float:
    return float(term.weight * x["requests decoding"] * compute_ms(x, x["n"], x["p"]))


def reached_per_ms(x: Inputs) -> float:
    return x["prompts"] / (1000 * max(1 - x["busy"], 0.05))


def congestion(x: Inputs, term: Any) -> float:
    added = compute_ms(x, x["n"], max(x["p"], x["shared"]))
    ahead = term.pod * (work_ahead_ms(x) + added / 2) + term.fleet * x["backlog"]
    return float(reached_per_ms(x) * added * ahead)


def eviction(x: Inputs, term: Any) -> float:
    delay = min(reached_per_ms(x) * x["backlog"], 100)
    missing = x["n"] - max(x["held here"], x["shared"])
    reuse = term.reuse + term.learnt * x["learnt reuse"]
    return float(reuse * (1 + term.congestion * delay) * x["c1"] * missing)


def warm_up(x: Inputs, term: Any) -> float:
    return float(term.weight * (1 - x["age"] / term.slow_start_s) * x["queued prefill"]) if "age" in x else 0.0


FORMULAS: Mapping[str, Callable[[Inputs, Any], float]] = {
    formula.__name__: formula
    for formula in (
        *(queue, prefill, hot_prefix_credit, tier_read, transfer, handoff, decode),
        *(kv_wait, held_kv, lent_prefill, kv_pressure, decode_interference, congestion, eviction, warm_up),
    )
}


def test_every_term_is_recomputed_here() -> None:
    """A new term needs its formula above."""
    assert set(FORMULAS) == set(COSTS)


@given(scenes(), st.builds(Links, elsewhere=links, cpu=st.none() | links, disk=links, remote=st.none() | links))
def test_every_part_can_be_recomputed_from_the_inputs_shown(seen: Scene, ways: Links) -> None:
    """This holds for every candidate and every term of the catalog."""
    seen = structs.replace(seen, fleet=replace(seen.fleet, links=ways))
    try:
        decision = decide(seen, ALL)
    except RouterError:
        return
    found = explain(seen, ALL, [priced(one) for one in decision.candidates], len(decision.candidates), decision.reason)
    for column in found.columns:
        shown = {each.name: each.value for each in column.inputs}
        for name, ms in column.plan.parts:
            term = dict(ALL.costs)[name]
            assert FORMULAS[name](of_side(shown, term), term) == pytest.approx(ms, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("name", COSTS)
def test_the_formula_of_a_term_names_its_inputs(name: str) -> None:
    """On a busy prefill pod that pulls, receives a handoff, reads all tiers and has just started."""
    link = Link(1.0, 1e6)
    transfer = Transfer(pod("b"), link, 10, 1, 2.0, 3.0)
    busy = at(
        cached_tokens=90,
        held_tokens=(30, 20, 20, 20),
        links=Links(cpu=link, disk=link, remote=link),
        pod=pod("a", role=Role.PREFILL, capacity_tokens=10_000, ready_since_s=-1.0),
        load=PodLoad(running=2, waiting=3),
        inflight=InFlight(3, 1, 100, 5.0, 500, head_ms=5.0),
        pull=transfer,
        handoff=transfer,
    )
    formula = inspect.getdoc(COSTS[name]) or ""
    inputs = [re.sub("^(cpu|disk|remote) ", "", each.name) for each in COSTS[name]().inputs(busy)]
    assert inputs
    assert [each for each in inputs if not re.search(rf"\b{re.escape(each)}\b", formula)] == []


def of_side(shown: Mapping[str, float], term: CostTerm) -> Inputs:
    """The inputs of the pod that the term prices."""
    if term.side is Side.PREFILL:
        return shown
    decode_pod = {name.removesuffix(ON_DECODE_POD): ms for name, ms in shown.items() if name.endswith(ON_DECODE_POD)}
    return {**shown, **decode_pod}
