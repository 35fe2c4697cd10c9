"""How does a policy's YAML become something that decides?

    name: cost_aware
    about: one line
    costs:              # terms of the price, in ms; the keys are names of `policy/catalog.py`
      queue: {}
      prefill: {}
    picker:
      lowest_cost: {}

This file never reads a file: `stores` and `wiring` bring it parsed data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    create_model,
    field_validator,
)

from router.policy.catalog import COSTS, PICKERS
from router.policy.term import Costs, CostTerm, Picker, Side

OnNoPrefill = Literal["aggregate", "fail"]


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy, ready to decide. `version` changes whenever what it says changes."""

    name: str
    version: str
    costs: Costs
    picker: Picker
    on_no_prefill: OnNoPrefill = "aggregate"
    shortlist: int = 0

    pulls: bool = field(init=False)
    """Whether it can price the fetching of KV from peers: what has no price is not planned."""
    splits: bool = field(init=False)
    """Whether it can price a handoff from a prefill pod to a decode pod."""
    _sides: Mapping[Side, Costs] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = {name for name, _ in self.costs}
        by_side = {side: tuple(cost for cost in self.costs if cost[1].side is side) for side in Side}
        for attribute, value in (("pulls", "transfer" in names), ("splits", "handoff" in names), ("_sides", by_side)):
            object.__setattr__(self, attribute, value)

    def costs_of(self, side: Side) -> Costs:
        """The terms that price that side of a split."""
        return self._sides[side]


def _choices(name: str, table: Mapping[str, type[BaseModel]]) -> type[BaseModel]:
    """A strict model with one optional field per catalog entry, so that a typo is an unknown key with a line."""
    fields: dict[str, Any] = {
        key: (Annotated[kind | None, BeforeValidator(_not_empty)], None) for key, kind in table.items()
    }
    return create_model(name, __config__=ConfigDict(frozen=True, extra="forbid"), **fields)


def _not_empty(value: Any) -> Any:
    """`queue:` with nothing behind it must not mean "no queue"."""
    if value is None:
        raise ValueError("nothing stands behind it; write {} for its defaults")
    return value


CostChoices = _choices("CostChoices", COSTS)
PickerChoice = _choices("PickerChoice", PICKERS)


class PolicySpec(BaseModel):
    """One file of `policies/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    about: str
    costs: CostChoices = CostChoices()  # type: ignore[valid-type]
    picker: PickerChoice  # type: ignore[valid-type]
    on_no_prefill: OnNoPrefill = "aggregate"
    """Where prefill and decode are apart and no prefill pod is ready: let decode pods compute, or refuse."""
    shortlist: NonNegativeInt = 0
    """How many pods are priced in full: those with the least outstanding work and uncached prompt. 0 for all."""

    @field_validator("picker")
    @classmethod
    def _one_picker(cls, picker: BaseModel) -> BaseModel:
        if len(_chosen(picker)) != 1:
            raise ValueError(f"name exactly one of {', '.join(sorted(PICKERS))}")
        return picker

    def build(self) -> Policy:
        """The policy that this file describes."""
        ((_, picker),) = _chosen(self.picker)
        version = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        costs = tuple((name, cast(CostTerm, term)) for name, term in _chosen(self.costs))
        return Policy(self.name, version, costs, cast(Picker, picker), self.on_no_prefill, self.shortlist)


def parse_policy(data: Mapping[str, Any]) -> Policy:
    """A policy from plain data. Raises pydantic's `ValidationError`."""
    return PolicySpec.model_validate(data).build()


def _chosen(choice: BaseModel) -> list[tuple[str, Any]]:
    return [(name, value) for name in type(choice).model_fields if (value := getattr(choice, name)) is not None]


__all__ = ["Policy", "PolicySpec", "ValidationError", "parse_policy"]
