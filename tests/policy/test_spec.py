"""From YAML to something that decides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from router.policy.catalog import COSTS, PICKERS
from router.policy.costs.effects import DecodeTerm
from router.policy.pickers import LowestCost
from router.policy.spec import parse_policy
from router.policy.term import Side

PLAIN: dict[str, Any] = {
    "name": "mine",
    "about": "for a test",
    "costs": {"queue": {}, "decode": {"weight": 0.5}},
    "picker": {"lowest_cost": {}},
}


def changed(*path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(PLAIN)
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return data


def test_a_policy_is_its_terms_and_its_picker() -> None:
    """By name, with their fields."""
    policy = parse_policy(PLAIN)
    assert policy.name == "mine"
    assert [name for name, _ in policy.costs] == ["queue", "decode"]
    assert dict(policy.costs)["decode"] == DecodeTerm(weight=0.5)
    assert policy.picker == LowestCost()


@pytest.mark.parametrize(
    ("path", "value", "blamed"),
    [
        (("costs", "luck"), {}, ("costs", "luck")),
        (("picker", "dice"), {}, ("picker", "dice")),
        (("colour",), "red", ("colour",)),
        (("costs", "decode", "wieght"), 1.0, ("costs", "decode", "wieght")),
        (("picker", "lowest_cost", "indiference_ms"), 1.0, ("picker", "lowest_cost", "indiference_ms")),
        (("picker", "in_turn"), {}, ("picker",)),
        (("picker",), {}, ("picker",)),
        (("costs", "queue"), None, ("costs", "queue")),
        (("picker", "lowest_cost"), None, ("picker", "lowest_cost")),
        (("name",), "Not A Name", ("name",)),
        (("costs", "decode", "weight"), -1, ("costs", "decode", "weight")),
        (("costs", "decode", "weight"), float("nan"), ("costs", "decode", "weight")),
        (("costs", "decode", "weight"), float("inf"), ("costs", "decode", "weight")),
        (("pd",), {"on_no_prefill": "wait"}, ("pd", "on_no_prefill")),
        (("shortlist",), -1, ("shortlist",)),
    ],
)
def test_a_mistake_is_refused_where_it_stands(path: tuple[str, ...], value: Any, blamed: tuple[str, ...]) -> None:
    """Unknown names and keys, two pickers or none, nothing behind a name, numbers that are none."""
    with pytest.raises(ValidationError) as caught:
        parse_policy(changed(*path, value=value))
    assert [problem["loc"] for problem in caught.value.errors()] == [blamed]


def test_the_version_changes_with_the_content_and_only_with_it() -> None:
    """A written default is the default."""
    version = parse_policy(PLAIN).version
    assert parse_policy(copy.deepcopy(PLAIN)).version == version
    assert parse_policy(changed("picker", "lowest_cost", "indifference_ms", value=0.0)).version == version
    others = [
        changed("name", value="yours"),
        changed("costs", "decode", "weight", value=0.6),
        changed("costs", "prefill", value={}),
        changed("picker", "lowest_cost", "indifference_ms", value=1.0),
        changed("picker", value={"in_turn": {}}),
        changed("pd", value={"on_no_prefill": "fail"}),
        changed("shortlist", value=8),
    ]
    assert len({version, *(parse_policy(other).version for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("picker", sorted(PICKERS))
def test_every_picker_of_the_catalog_can_be_named(picker: str) -> None:
    """With its defaults."""
    assert repr(parse_policy(changed("picker", value={picker: {}})).picker) == repr(PICKERS[picker]())


@pytest.mark.parametrize("cost", sorted(COSTS))
def test_every_cost_of_the_catalog_can_be_named(cost: str) -> None:
    """With its defaults."""
    assert repr(parse_policy(changed("costs", value={cost: {}})).costs) == repr(((cost, COSTS[cost]()),))


def test_what_has_no_price_is_not_planned() -> None:
    """Pulls need `transfer`, handoffs `handoff`."""
    for name, expected in (("queue", (False, False)), ("transfer", (True, False)), ("handoff", (False, True))):
        found = parse_policy(changed("costs", value={name: {}}))
        assert (found.pulls, found.splits) == expected


def test_without_a_word_decode_pods_help_themselves_and_every_pod_is_priced() -> None:
    """What a file says of it is what counts."""
    plain = parse_policy(PLAIN)
    assert (plain.on_no_prefill, plain.shortlist) == ("aggregate", 0)
    strict = parse_policy({**PLAIN, "pd": {"on_no_prefill": "fail"}, "shortlist": 8})
    assert (strict.on_no_prefill, strict.shortlist) == ("fail", 8)


def test_every_cost_is_priced_on_one_side_of_a_split() -> None:
    """In the order of the catalog: what is computed where the prompt is, what is waited for where the answer is."""
    found = parse_policy(changed("costs", value={name: {} for name in COSTS}))
    computing, answering = ([name for name, _ in found.costs_of(side)] for side in (Side.PREFILL, Side.DECODE))
    assert {"queue", "prefill", "transfer"} <= set(computing)
    assert {"handoff", "decode", "kv_wait"} <= set(answering)
    assert [name for name in COSTS if name in computing] == computing
    assert [name for name in COSTS if name in answering] == answering
    assert sorted([*computing, *answering]) == sorted(COSTS)


def test_splits_need_a_price_and_leave() -> None:
    """`pd.splits: false` takes them away where the price is inherited; `true` alone brings none."""
    handoff = changed("costs", value={"handoff": {}})
    assert parse_policy(handoff).splits
    assert not parse_policy(handoff | {"pd": {"splits": False}}).splits
    assert not parse_policy({**PLAIN, "pd": {"splits": True}}).splits


def test_match_and_percent_are_fields_of_the_policy() -> None:
    """Match, share and attempts; without a word everything, as configured."""
    plain = parse_policy(PLAIN)
    assert (plain.match, plain.percent, plain.attempts) == (None, 100, None)
    said = parse_policy(PLAIN | {"match": {"tenant": "acme"}, "percent": 5, "retry": {"attempts": 1}})
    assert said.match is not None and said.match.tenant == ("acme",)
    assert (said.percent, said.attempts) == (5, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"percent": 5},
        {"match": {}, "percent": 101},
        {"retry": {"attempts": 12}},
        {"slo": {"ttft_ms": 0}},
    ],
)
def test_use_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """A share of nothing, more than all, more attempts than candidates."""
    with pytest.raises(ValidationError):
        parse_policy(PLAIN | wrong)
