"""What is printed can be recomputed by hand."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from router.cli.explain_command import page
from router.cli.terminal import printable
from router.errors import RouterError
from router.observe.receipts import Explained, Failure, Outcome, RecordedDecision, explained, record_decision
from router.policy.decide import decide
from router.policy.recording import record
from router.policy.spec import Policy
from router.types import PodLoad, PodState, PodStatus, Scene
from tests.examples import examples
from tests.policy.scenes import POLICIES, holding, pod, policy, ready, scene, scenes


def kept(seen: Scene, by: Policy) -> RecordedDecision:
    return record_decision(record(seen), decide(seen, by), by, 0.0)


def printed(found: Explained, width: int = 100) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(page(found))
    out = console.file
    assert isinstance(out, StringIO)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def cells(lines: list[str], label: str) -> list[float]:
    """The numbers of one row."""
    row = next(line for line in lines if line.strip().startswith(label + ", ms"))
    return [float(cell.replace(",", "")) for cell in row.split(", ms", 1)[1].split()]


@examples(40)
@given(scenes(linked=False), st.sampled_from([POLICIES["cost_aware"], POLICIES["ring_bounded_load"]]))
def test_printed_parts_add_up_to_the_printed_cost(seen: Scene, by: Policy) -> None:
    """In every column, to the last digit."""
    try:
        found = explained(kept(seen, by))
    except RouterError:
        return
    lines = printed(found, 200)
    names = [name for name, _ in found.explanation.columns[0].plan.parts]
    rows = [cells(lines, name) for name in names if any(line.strip().startswith(f"{name}, ms") for line in lines)]
    costs = cells(lines, "= cost")
    assert [round(sum(column), 2) for column in zip(*rows, strict=True)] == (costs if rows else [])
    assert rows or not any(costs)


def test_parts_that_are_zero_for_every_candidate_are_counted_in_one_row() -> None:
    """A part that is not zero for one candidate is a row."""
    waits = PodStatus(pod("a:1"), PodState.READY, PodLoad(waiting=9))
    lines = printed(
        explained(kept(scene(waits, *ready(pod("b:1"))), policy("queue", "prefill", "transfer", "tier_read")))
    )
    labels = [line.split(", ms")[0].strip() for line in lines]
    assert {"queue", "prefill"} < set(labels) and not {"transfer", "tier_read"} & set(labels)
    assert " terms that are 0: 2" in lines


def test_actual_and_expected_values_are_printed() -> None:
    """First token, cached tokens and failed pods, within 100 columns."""
    seen = holding(scene(*ready(*(pod(f"10.0.0.{number}:8000") for number in range(6)))), "10.0.0.3:8000", 50)
    made = kept(seen, policy("queue", "prefill"))
    made.outcome = Outcome(
        id="r", at_s=0.0, model="m", endpoint="chat", result="ok", cached_tokens=790, ttft_ms=31.5, e2e_ms=99.9,
        served=made.candidates[1], failures=(Failure("10.0.0.3:8000", "connect_failed", "refused"),),
    )  # fmt: skip
    lines = printed(explained(made))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert "4 of 6 candidates" in text and "chosen" in text and "runner-up, served" in text
    assert "first token: expected after 21.40 ms, actual 31.50 ms" in text
    assert "cached tokens: expected 0, actual 790" in text
    assert "failed: 10.0.0.3:8000: connect_failed: refused" in text
    assert "p, cached tokens" in text and "prefill = F + c1 (n - p + e)" in text
    assert "waiting at engine" not in text  # it is 0 everywhere


def test_the_first_token_of_a_response_that_is_not_streamed_is_unknown() -> None:
    """The reason is printed with it."""
    made = kept(scene(*ready(pod("a:1"))), policy("queue", "prefill"))
    made.outcome = Outcome(
        id="r", at_s=0.0, model="m", endpoint="chat", result="ok", cached_tokens=0, e2e_ms=99.9,
        served=made.candidates[0],
    )  # fmt: skip
    assert "actual unknown (known for streams only)" in "\n".join(printed(explained(made)))


def test_long_names_are_printed_in_full_within_80_columns() -> None:
    """One line a candidate, so that they can be copied."""
    names = [f"decode-pool-llama-70b-{number}.inference.svc.cluster.local:8000" for number in range(4)]
    lines = printed(explained(kept(scene(*ready(*map(pod, names))), POLICIES["cost_aware"])), 80)
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    listed = [
        line.split()[-1] for line in lines if line.split() and line.split()[0] in ("chosen", "runner-up", "third")
    ]
    assert set(names) >= {name for name in listed if ":" in name} and sum(":" in name for name in listed) == 3


def test_the_effect_of_a_filter_is_one_line() -> None:
    """It names the excluded pods, or says that the filter was ignored."""
    full = tuple(PodStatus(one.pod, one.state, PodLoad(waiting=9)) for one in ready(*(pod(f"a{n}") for n in range(6))))
    by = policy("queue", filters={"hardware": {"only": "b200x8"}, "max_waiting": {}})
    lines = printed(explained(kept(scene(*full, *ready(pod("b"), pod("c"))), by)))
    assert "filter hardware: ignored, since it would leave no usable pod" in lines
    assert "filter max_waiting: excluded 6 pods: a0, a1, a2, a3 and 2 more" in lines


def test_a_policy_without_prices_is_explained_by_its_reason() -> None:
    """A table without parts."""
    text = "\n".join(printed(explained(kept(scene(*ready(pod("a"), pod("b")), turn=1), POLICIES["round_robin"]))))
    assert "by turn 1" in text and "= cost, ms" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("[fe80::1]:8000", "[fe80::1]:8000"), ("[red]x", "[red]x"), ("\x1b[2Jgone", "?[2Jgone"), ("größe 7", "größe 7")],
)
def test_names_are_printed_without_markup_or_control_characters(text: str, shown: str) -> None:
    assert printable(text).plain == shown
