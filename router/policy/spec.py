"""Parses a policy's YAML into a `Policy` that can decide.

    name: nightly
    about: one line
    extends: batch      # start from that policy; `config/policy_files.py` has merged it already
    match: {tenant: etl}                # decides these requests; without it, only if it is the default
    percent: 5                          # and only this share of them
    filters:            # exclude pods before pricing, if others are left
      max_waiting: {requests: 8}
    costs:              # terms of the cost, in ms; the keys are names of `policy/catalog.py`
      queue: {}
      prefill: {}
    picker:
      lowest_cost: {}
    shortlist: 16
    retry: {attempts: 2}                # candidates tried in all
    pd: {on_no_prefill: fail}

This file never reads a file: `config` brings it parsed data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    create_model,
    field_validator,
    model_validator,
)

from router.policy.catalog import COSTS, FILTERS, PICKERS
from router.policy.match import Match
from router.policy.term import Costs, Filters, Picker, Side

OnNoPrefill = Literal["aggregate", "fail"]


class _SpecSection(BaseModel):
    """A part of a policy file: frozen and strict."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy, ready to decide. `version` changes when its file changes."""

    name: str
    version: str
    costs: Costs
    picker: Picker
    on_no_prefill: OnNoPrefill = "aggregate"
    shortlist: int = 0
    considers_splits: bool = True
    match: Match | None = None
    percent: float = 100.0
    attempts: int | None = None
    """Maximum number of candidates to try; None: 1 + `limits.retries` of the configuration."""
    hold_tool_calls: bool = False
    filters: Filters = ()

    cost_names: tuple[str, ...] = field(init=False)
    """Names of `costs`: one tuple shared by all its costs."""
    pulls: bool = field(init=False)
    """Whether it has a term for pulls: without one no pull is planned."""
    splits: bool = field(init=False)
    """Whether it considers splits and has a term for handoffs."""
    _sides: Mapping[Side, Costs] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = tuple(name for name, _ in self.costs)
        by_side = {side: tuple(cost for cost in self.costs if cost[1].side is side) for side in Side}
        splits = self.considers_splits and "handoff" in names
        pulls = "transfer" in names
        for attribute, value in (("cost_names", names), ("pulls", pulls), ("splits", splits), ("_sides", by_side)):
            object.__setattr__(self, attribute, value)

    def costs_of(self, side: Side | None) -> Costs:
        """The terms of one side of a split; None: all, of a plan without one."""
        return self._sides[side] if side else self.costs


def choice_model(name: str, table: Mapping[str, type[BaseModel]]) -> type[BaseModel]:
    """A strict model with one optional field per catalog entry: a typo is reported as an unknown key with its line."""
    fields: dict[str, Any] = {
        key: (Annotated[kind | None, BeforeValidator(_not_empty)], None) for key, kind in table.items()
    }
    return create_model(name, __config__=ConfigDict(frozen=True, extra="forbid"), **fields)


def _not_empty(value: Any) -> Any:
    """Rejects `queue:` with an empty value, which does not mean "no queue"."""
    if value is None:
        raise ValueError("empty value; write {} for the defaults")
    return value


FilterChoices = choice_model("FilterChoices", FILTERS)
CostChoices = choice_model("CostChoices", COSTS)
PickerChoice = choice_model("PickerChoice", PICKERS)


class RetrySpec(_SpecSection):
    """What happens when a pod fails before the first byte."""

    attempts: Annotated[int, Field(ge=1, le=11)] | None = None
    """Maximum number of candidates to try, 1 for no retry; null: 1 + `limits.retries` of the configuration. At most two
    of them receive the request."""


class PdSpec(_SpecSection):
    """Prefill and decode on different pods."""

    on_no_prefill: OnNoPrefill = "aggregate"
    """While a fleet with roles has no ready prefill pod: `aggregate` lets decode pods compute prompts, `fail` answers
    requests with a 503."""
    splits: bool = True
    """Whether pairs of pods are considered; this also needs the cost term `handoff`."""


class ContinuationSpec(_SpecSection):
    """How broken streams go on, where `continuation.enabled` of the configuration lets them."""

    hold_tool_calls: bool = False
    """Tool calls of sampled chats are held until all calls of the answer are whole: until then, another pod may make
    them. Clients get them later, at once."""


class PolicySpec(_SpecSection):
    """One file of `policies/`, with what it extends."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """The file's name without .yaml."""
    about: str
    """Description in one line."""
    extends: str | None = None
    """A policy to start from: the keys of this file override its keys; null removes one. `match` and `percent`
    are not inherited."""
    match: Match | None = None
    """The requests that it decides; `{}` for all. Without `match`, it decides only as the default."""
    percent: Annotated[float, Field(gt=0, le=100)] = 100.0
    """Share of the matching requests that it decides, as a canary: selected by a hash of the session or request id."""
    filters: FilterChoices = FilterChoices()  # type: ignore[valid-type]
    """Exclude pods before pricing, as long as a usable pod is left."""
    costs: CostChoices = CostChoices()  # type: ignore[valid-type]
    """Terms of the cost, in milliseconds, which are added."""
    picker: PickerChoice  # type: ignore[valid-type]
    """Orders the priced candidates: exactly one."""
    shortlist: NonNegativeInt = 0
    """Number of pods priced in full: those with the least outstanding work and uncached prompt. 0 for all."""
    retry: RetrySpec = RetrySpec()
    pd: PdSpec = PdSpec()
    continuation: ContinuationSpec | None = None

    @field_validator("picker")
    @classmethod
    def _one_picker(cls, picker: BaseModel) -> BaseModel:
        if len(_chosen(picker)) != 1:
            raise ValueError(f"name exactly one of {', '.join(sorted(type(picker).model_fields))}")
        return picker

    @model_validator(mode="after")
    def _percent_requires_match(self) -> PolicySpec:
        if self.match is None and self.percent != 100:
            raise ValueError(f"percent ({self.percent:g}) requires `match`; write `match: {{}}` for all requests")
        return self

    def build(self) -> Policy:
        ((_, picker),) = _chosen(self.picker)
        version = hashlib.sha256(self.model_dump_json(exclude={"extends"}, exclude_none=True).encode()).hexdigest()[:12]
        return Policy(
            self.name,
            version,
            tuple(_chosen(self.costs)),
            picker,
            on_no_prefill=self.pd.on_no_prefill,
            shortlist=self.shortlist,
            considers_splits=self.pd.splits,
            match=self.match,
            percent=self.percent,
            attempts=self.retry.attempts,
            hold_tool_calls=self.continuation is not None and self.continuation.hold_tool_calls,
            filters=tuple(_chosen(self.filters)),
        )


def parse_policy(data: Mapping[str, Any]) -> Policy:
    """A policy from plain data. Raises pydantic's `ValidationError`."""
    return PolicySpec.model_validate(data).build()


def _chosen(choice: BaseModel) -> list[tuple[str, Any]]:
    return [(name, value) for name in type(choice).model_fields if (value := getattr(choice, name)) is not None]
