"""An explanation can be recomputed by hand, and says which number decided."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RouterError
from router.policy.calibration import class_key
from router.policy.decide import decide
from router.policy.explain import Explanation, explain, in_hundredths, priced
from router.policy.spec import Policy
from router.types import InFlight, Link, Links, Role, Scene
from tests.kit.scenes import POLICIES, holding, pod, policy, prompt, ready, request, scene, scenes

milliseconds = st.floats(-1e7, 1e7)


def explained(seen: Scene, by: Policy, most: int = 4) -> Explanation:
    decision = decide(seen, by)
    return explain(
        seen, by, [priced(one) for one in decision.candidates[:most]], len(decision.candidates), decision.reason
    )


@given(st.lists(milliseconds, min_size=1, max_size=12))
def test_printed_parts_add_up_to_the_printed_total(parts: list[float]) -> None:
    """Exactly; and each is off by less than a hundredth."""
    total = sum(parts)
    found = in_hundredths(parts, total)
    assert sum(found) == round(total * 100)
    assert all(abs(cents - ms * 100) <= 1 + 1e-5 for cents, ms in zip(found, parts, strict=True))


def test_no_parts_give_an_empty_list() -> None:
    """A policy without terms."""
    assert in_hundredths([], 0.0) == []


def test_a_part_that_needs_no_rounding_is_printed_as_it_is() -> None:
    """What is missing goes to those who lose most."""
    assert in_hundredths([1.0, 0.006, 0.007, 0.003], 1.016) == [100, 1, 1, 0]


@given(scenes(), st.sampled_from(list(POLICIES.values())))
def test_every_decision_can_be_explained(seen: Scene, by: Policy) -> None:
    """By every policy; each column has its cost, and each input once."""
    try:
        found = explained(seen, by)
    except RouterError:
        return
    assert found.why and len(found.columns) <= 4
    for column in found.columns:
        assert sum(ms for _, ms in column.plan.parts) == pytest.approx(column.plan.total_ms, abs=1e-6)
        names = [each.name for each in column.inputs]
        assert names[:2] == ["n", "p"] and len(names) == len(set(names))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


def test_a_price_can_be_recomputed_from_its_inputs() -> None:
    """T_prefill(n, p) and the queue, from what is shown alone."""
    work = InFlight(
        requests=2, prefill_requests=2, prefill_tokens=900, prefill_ms=70.0, context_tokens=900, head_ms=50.0
    )
    seen = holding(scene(*ready(pod("a"), pod("b")), inflight={"a": work}, now_s=0.02), "a", 30)
    column = next(c for c in explained(seen, policy("queue", "prefill")).columns if c.plan.choice.pod == "a")
    x = {each.name: each.value for each in column.inputs}
    prefill = x["F"] + x["c1"] * (x["n"] - x["p"]) + x["c2"] * (x["n"] ** 2 - x["p"] ** 2)
    assert dict(column.plan.parts)["prefill"] == pytest.approx(prefill)
    rest = max(0, x["F"] + x["W_in"] - x["time since step began"])
    assert dict(column.plan.parts)["queue"] == pytest.approx(rest + x["W_behind"])
    assert column.costs_of == class_key(pod("a"))


def test_a_handoff_can_be_recomputed_from_its_inputs() -> None:
    """t0 + bytes / B * (1 + concurrent transfers); the prompt's numbers are those of the prefill pod."""
    half = {"handoff": "nixl", "kv_bytes_per_token": 1000}
    seen = scene(
        *ready(
            pod("p", role=Role.PREFILL, hardware="h100x8", **half),
            pod("d", role=Role.DECODE, serves_alone=False, **half),
        ),
        links=Links(elsewhere=Link(2.0, 1e6)),
        inflight={"p": InFlight(pulls=1)},
    )
    found = explained(seen, policy("prefill", "handoff", "decode"))
    column = found.columns[0]
    x = {each.name: each.value for each in column.inputs}
    bytes_per_ms = x["handoff B"] * 1e6 / (1 + x["handoff concurrent"])
    expected = x["handoff t0"] + x["handoff tokens"] * x["kv_bytes_per_token"] / bytes_per_ms
    assert dict(column.plan.parts)["handoff"] == pytest.approx(expected) == 4.0
    assert column.costs_of.endswith("/h100x8"), "the class of the pod that computes the prompt"
    assert str(column.plan.choice) == "p > d" and found.why.startswith("Only p > d could serve it.")


def test_a_pull_can_be_recomputed_from_its_inputs() -> None:
    """What is left of it once the pod has done the work ahead."""
    fast = {"pulls": "p2p", "kv_bytes_per_token": 1000}
    pods, work = ready(pod("a", **fast), pod("b", **fast)), InFlight(prefill_requests=1, head_ms=3.0)
    seen = holding(scene(*pods, links=Links(elsewhere=Link(2.0, 1e5)), inflight={"a": work}), "b", 60)
    by = policy("queue", "prefill", "transfer")
    column = next(one for one in explained(seen, by).columns if str(one.plan.choice) == "a < b")
    x = {each.name: each.value for each in column.inputs}
    bytes_per_ms = x["pull B"] * 1e6 / (1 + x["pull concurrent"])
    whole = x["pull t0"] + x["kv_bytes_per_token"] * x["pull tokens"] / bytes_per_ms
    ahead = max(0, x["F"] + x["W_in"] - x["time since step began"]) + x["W_behind"]
    assert dict(column.plan.parts)["transfer"] == pytest.approx(whole - ahead) and ahead > 0


def test_the_sentence_names_the_part_that_decided() -> None:
    """What the runner-up would have cost there."""
    seen = holding(scene(*ready(pod("a"), pod("b"))), "a", 50)
    assert explained(seen, policy("queue", "prefill")).why == (
        "a, by lowest cost: 16.26 ms cheaper than b, mostly in prefill (5.14 instead of 21.40). "
        "800 of 1,000 prompt tokens were expected in its cache."
    )


def test_the_sentence_admits_that_price_did_not_decide() -> None:
    """Ties, and policies that go by something else."""
    idle = scene(*ready(pod("a"), pod("b")))
    assert "costs the same, and a hash of" in explained(idle, policy("queue")).why
    busy = scene(*ready(pod("a"), pod("b")), turn=0, inflight={"a": InFlight(1, 1, 9, 30.0)})
    turns = policy("queue", picker={"in_turn": {}})
    assert "b is 30.00 ms cheaper, but this policy does not choose by cost alone" in explained(busy, turns).why
    assert "this policy has no costs" in explained(busy, POLICIES["round_robin"]).why
    work = {"a": InFlight(1, 1, 9, 5.0), "b": InFlight(1, 1, 9, 5.5)}
    near = scene(*ready(pod("a"), pod("b")), inflight=work)
    assert "costs the same within 1 ms" in explained(near, POLICIES["cost_aware"]).why


def test_the_sentence_names_the_key_that_decided_between_equal_costs() -> None:
    """Where it comes from, without its value: part of the prompt, else the session, else the request's id."""
    idle = scene(*ready(pod("a"), pod("b")), request=request("secret-id", session="secret-session"))
    found = [
        explained(seen, policy("queue")).why
        for seen in (
            idle,
            msgspec.structs.replace(idle, prompt=prompt(5)),
            msgspec.structs.replace(idle, prompt=None, request=request("secret-id")),
        )
    ]
    assert "costs the same, and a hash of the first 32 prompt tokens decided" in found[0]
    assert (
        "costs the same, and a hash of the session id (`edge.session_headers`, or `session_id` of the body)" in found[1]
    )
    assert "costs the same, and a hash of the request id decided" in found[2]
    assert not any("secret" in why for why in found)


def test_terms_come_with_formula_and_parameters() -> None:
    """As their docstrings and the policy say."""
    (note,) = explained(scene(*ready(pod("a"))), policy(costs={"eviction": {"reuse": 2.0}})).terms
    assert (note.name, note.parameters) == ("eviction", {"reuse": 2.0, "learnt": 0.0, "congestion": 0.0})
    lines = ("D = min(K * backlog, 100) K = prompts / (1000 * max(1 - busy, 0.05))",)
    eviction = "eviction = (reuse + learnt * R) * (1 + congestion * D) * c1 * (n - max(held here, shared))"
    assert note.formula.splitlines() == [*lines, eviction]
    (note,) = explained(scene(*ready(pod("a"))), policy("transfer")).terms
    first, second = note.formula.splitlines()
    assert first.startswith("T_x = pull t0 + ") and second.startswith("transfer = max(0, T_x - ")


def test_every_term_of_the_default_policy_has_a_formula() -> None:
    """Otherwise nobody could recompute it."""
    assert all(" = " in note.formula for note in explained(scene(*ready(pod("a"))), POLICIES["cost_aware"]).terms)


def test_the_sentence_admits_that_the_prompt_was_not_read() -> None:
    """Then its length is a guess, and so is the price."""
    unread = scene(*ready(pod("a"), pod("b")), prompt=None)
    assert explained(unread, policy("queue", "prefill")).why.endswith("n is estimated from the length of the body.")
