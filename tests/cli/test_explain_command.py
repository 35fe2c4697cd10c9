"""What is printed can be recomputed by hand."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from router.cli.explain_command import page
from router.cli.receipt_files import recorded
from router.cli.terminal import printable
from router.errors import RouterError
from router.observe.ended import Ended, Failure, RecordedDecision
from router.observe.receipts import Explained, Line, Receipt, explained, explained_later
from router.observe.receipts import receipt as receipt_of
from router.policy.decide import decide
from router.policy.recording import FleetLine, record
from router.policy.spec import Policy
from router.types import PodLoad, PodState, PodStatus, Scene
from tests.cli.receipt_lines import BY, lines, made, write
from tests.kit.command_line import Typed
from tests.kit.scenes import POLICIES, holding, pod, policy, ready, scene, scenes


def kept(seen: Scene, by: Policy) -> RecordedDecision:
    return RecordedDecision.of(record(seen), decide(seen, by), by, 0.0)


def decoded(line: bytes) -> Line:
    return msgspec.json.decode(line, type=Receipt | FleetLine)


def printed(found: Explained, width: int = 100, *, formulas: bool = False) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(page(found, formulas=formulas))
    out = console.file
    assert isinstance(out, StringIO)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def cells(lines: list[str], label: str) -> list[float]:
    """The numbers of one row."""
    row = next(line for line in lines if line.strip().startswith(label + ", ms"))
    return [float(cell.replace(",", "")) for cell in row.split(", ms", 1)[1].split()]


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
    ended = Ended(
        "r", 0.0, "m", "chat", "ok", decision=made, cached_tokens=790, ttft_ms=31.5, e2e_ms=99.9,
        served=made.candidates[1], failures=(Failure("10.0.0.3:8000", "connect_failed", "refused"),),
    )  # fmt: skip
    lines = printed(explained(made, ended), formulas=True)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert "4 of 6 candidates" in text and "chosen" in text and "runner-up, served" in text
    assert "first token: expected after 21.40 ms, actual 31.50 ms" in text
    assert "cached tokens: expected 0, actual 790" in text
    assert "failed: 10.0.0.3:8000: connect_failed: refused" in text
    assert "p, cached tokens" in text and "prefill = F + c1 (n - p + e)" in text
    assert "waiting at engine" not in text  # it is 0 everywhere
    shorter = "\n".join(printed(explained(made, ended)))
    assert "p, cached tokens" not in shorter and "prefill = F" not in shorter and "actual 790" in shorter


def test_the_first_token_of_a_response_that_is_not_streamed_is_unknown() -> None:
    """The reason is printed with it."""
    made = kept(scene(*ready(pod("a:1"))), policy("queue", "prefill"))
    ended = Ended(
        "r", 0.0, "m", "chat", "ok", decision=made, cached_tokens=0, e2e_ms=99.9,
        served=made.candidates[0],
    )  # fmt: skip
    assert "actual unknown (known for streams only)" in "\n".join(printed(explained(made, ended), formulas=True))


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


def test_a_request_that_a_provider_served_has_its_reason_and_money() -> None:
    """In place of prices, which no pod has."""
    served = Receipt(
        at_s=0.0, model="hosted", endpoint="chat", result="ok", id="r", name="chat", fallback="no_ready_pod", money=0.5
    )  # fmt: skip
    lines = printed(explained_later(served, None, None))
    assert lines[0] == "r  model hosted (asked for as chat; fallback: no_ready_pod)"
    assert lines[2] == "Provider hosted served it." and "money of the provider: 0.500000" in lines
    assert not any("candidates" in line for line in lines)


# --- from a file ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three requests of one minute, and one of the next."""
    found = [
        made(5, 10.0, name="first"),
        made(50, 900.0, name="slow"),
        made(20, 30.0, name="third"),
        made(61, name="later"),
    ]
    return write(tmp_path / "receipts.jsonl", lines(found))


def explained_ids(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines() if " policy cost_aware (version" in line]


def test_a_file_explains_what_arrived_in_a_minute(typed: Typed, file: Path) -> None:
    """The earliest first, or the slowest first token; each with its number among those of the minute."""
    at = ("--at", "2025-12-01T12:00Z")
    ended = typed("explain", "--file", file, *at)
    assert ended.code == 0 and explained_ids(ended.out) == ["first"] and "3 requests; explained: 1" in ended.out
    assert "arrived at 2025-12-01" in ended.out and "12:00:05" in ended.out
    assert explained_ids(typed("explain", "--file", file, *at, "--slow", "--limit", 2).out) == ["slow", "third"]
    assert explained_ids(typed("explain", "--file", file, "--at", "2025-12-01T12:01Z").out) == ["later"]
    assert explained_ids(typed("explain", "--file", file, "third").out) == ["third"]
    assert explained_ids(typed("explain", "--file", file, "--pod", "a", "--limit", 9).out) == [
        "first",
        "third",
        "slow",
        "later",
    ]


@pytest.mark.parametrize(
    "option", [("--model", "x"), ("--tenant", "x"), ("--pod", "x"), ("--at", "2024-01-01"), ("x",)]
)
def test_a_file_without_such_a_request_says_what_to_run(typed: Typed, file: Path, option: tuple[str, ...]) -> None:
    ended = typed("explain", "--file", file, *option)
    assert ended.code == 1 and "no such request; `warmroute receipts summary" in ended.err


def test_a_file_explains_as_the_running_router_does() -> None:
    """To the last character."""
    here = made(5, 10.0)
    receipt, scene = next(recorded(map(decoded, lines([here]))))
    assert here.decision is not None
    assert printed(explained_later(receipt, scene, BY), formulas=True) == printed(
        explained(here.decision, here), formulas=True
    )


@pytest.mark.parametrize(
    ("scenes", "by", "missing"),
    [(False, BY, "receipts.replay_data"), (True, None, f"version {BY.version} of the policy")],
)
def test_recorded_prices_are_shown_without_scene_or_policy(scenes: bool, by: Policy | None, missing: str) -> None:
    """What is missing is named; prices of another version would be others."""
    receipt, scene = next(recorded(map(decoded, lines([made(5)], scenes=scenes))))
    text = "\n".join(printed(explained_later(receipt, scene, by), formulas=True))
    assert missing in text and "inputs of the formulas" not in text and "= cost, ms" in text


def test_a_request_that_was_never_decided_is_explained_by_its_result() -> None:
    ended = Ended(id="r", at_s=1.0, model="m", endpoint="chat", result="no_ready_pod")
    assert "result: no_ready_pod, after 0.0 ms" in printed(explained_later(receipt_of(ended), None, None))


def test_explain_without_a_request_or_a_file_says_what_to_give(typed: Typed) -> None:
    assert typed("explain").code == 2
