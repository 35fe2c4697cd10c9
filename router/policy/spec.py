"""How does a policy's YAML become something that decides?

    name: nightly
    about: one line
    extends: batch      # begin with what that one says; `config/policies.py` has merged it by now
    match: {tenant: etl}                # decides these requests; without, only when it is named as the default
    percent: 5                          # and of these only so many
    filters:            # pods that are left out before anything is priced, if others are left
      max_waiting: {requests: 8}
    costs:              # terms of the price, in ms; the keys are names of `policy/catalog.py`
      queue: {}
      prefill: {}
    picker:
      lowest_cost: {}
    shortlist: 16
    retry: {attempts: 2}                # candidates tried in all
    pd: {on_no_prefill: fail}
    slo: {ttft_ms: 2000}
    shadow: {policy: cost_aware, rate: 0.1}

This file never reads a file: `config` brings it parsed data.
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
    PositiveFloat,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from router.policy.catalog import COSTS, FILTERS, PICKERS
from router.policy.match import Match
from router.policy.term import Costs, CostTerm, Filter, Filters, Picker, Side

OnNoPrefill = Literal["aggregate", "fail"]


@dataclass(frozen=True, slots=True)
class Shadow:
    """Which policy decides beside, without effect, and for what share (0..1) of the requests."""

    policy: str
    rate: float


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy, ready to decide. `version` changes whenever what it says changes."""

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
    """How many candidates may be tried; None as `limits.retries` of the configuration says."""
    slo_ttft_ms: float | None = None
    shadow: Shadow | None = None
    filters: Filters = ()

    cost_names: tuple[str, ...] = field(init=False)
    """Of `costs`: one value for all prices."""
    pulls: bool = field(init=False)
    """Whether it can price the fetching of KV from peers: what has no price is not planned."""
    splits: bool = field(init=False)
    """Whether it can price a handoff from a prefill pod to a decode pod."""
    _sides: Mapping[Side, Costs] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = tuple(name for name, _ in self.costs)
        by_side = {side: tuple(cost for cost in self.costs if cost[1].side is side) for side in Side}
        splits = self.considers_splits and "handoff" in names
        pulls = "transfer" in names
        for attribute, value in (("cost_names", names), ("pulls", pulls), ("splits", splits), ("_sides", by_side)):
            object.__setattr__(self, attribute, value)

    def costs_of(self, side: Side) -> Costs:
        """The terms that price that side of a split."""
        return self._sides[side]


def choice_model(name: str, table: Mapping[str, type[BaseModel]]) -> type[BaseModel]:
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


FilterChoices = choice_model("FilterChoices", FILTERS)
CostChoices = choice_model("CostChoices", COSTS)
PickerChoice = choice_model("PickerChoice", PICKERS)


class _Section(BaseModel):
    """Part of a policy file: frozen, strict, documented by its docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RetrySpec(_Section):
    """What happens when a pod fails before the first byte."""

    attempts: Annotated[int, Field(ge=1, le=11)] | None = None
    """Candidates that may be tried in all, 1 for no retry; null: 1 + `limits.retries` of the configuration."""


class PdSpec(_Section):
    """Prefill and decode on different pods."""

    on_no_prefill: OnNoPrefill = "aggregate"
    """Where prefill and decode are apart and no prefill pod is ready: let decode pods compute, or refuse (503)."""
    splits: bool = True
    """Whether pairs of pods are considered; they also need the cost term `handoff`, or they have no price."""


class SloSpec(_Section):
    """What the requests of this policy are promised. Nothing is refused by it."""

    ttft_ms: PositiveFloat | None = None
    """Target of the time to first token: `warmroute_policy_slo_requests_total` counts the streamed answers within it
    and beyond it."""


class ShadowSpec(_Section):
    """A policy that decides beside this one and sends nothing."""

    policy: str
    """Its name."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """For what share of the requests, 0 to 1."""


class PolicySpec(_Section):
    """One file of `policies/`, with what it extends."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """The file's name without .yaml."""
    about: str
    """What it does, in one line."""
    extends: str | None = None
    """A policy to begin with: what stands here is laid over it, key by key; null takes away what it says. `match`,
    `percent` and `shadow` are not taken over."""
    match: Match | None = None
    """Which requests it decides beside the default; `{}` for all. Without it, it decides only as the default."""
    percent: Annotated[float, Field(gt=0, le=100)] = 100.0
    """Of the requests that match, so many: a canary. Cut by a hash of the session or request id."""
    filters: FilterChoices = FilterChoices()  # type: ignore[valid-type]
    """Preferences that leave pods out before anything is priced. Where nobody would be left, nobody is left out."""
    costs: CostChoices = CostChoices()  # type: ignore[valid-type]
    """Terms of the price, in milliseconds, that are added up."""
    picker: PickerChoice  # type: ignore[valid-type]
    """How priced candidates are ordered: exactly one."""
    shortlist: NonNegativeInt = 0
    """How many pods are priced in full: those with the least outstanding work and uncached prompt. 0 for all."""
    retry: RetrySpec = RetrySpec()
    pd: PdSpec = PdSpec()
    slo: SloSpec = SloSpec()
    shadow: ShadowSpec | None = None

    @field_validator("picker")
    @classmethod
    def _one_picker(cls, picker: BaseModel) -> BaseModel:
        if len(_chosen(picker)) != 1:
            raise ValueError(f"name exactly one of {', '.join(sorted(type(picker).model_fields))}")
        return picker

    @model_validator(mode="after")
    def _share_of_something(self) -> PolicySpec:
        if self.match is None and self.percent != 100:
            raise ValueError("percent: of which requests? Say `match: {}` for all")
        return self

    def build(self) -> Policy:
        """The policy that this file describes."""
        ((_, picker),) = _chosen(self.picker)
        version = hashlib.sha256(self.model_dump_json(exclude={"extends"}, exclude_none=True).encode()).hexdigest()[:12]
        costs = tuple((name, cast(CostTerm, term)) for name, term in _chosen(self.costs))
        return Policy(
            self.name,
            version,
            costs,
            cast(Picker, picker),
            on_no_prefill=self.pd.on_no_prefill,
            shortlist=self.shortlist,
            considers_splits=self.pd.splits,
            match=self.match,
            percent=self.percent,
            attempts=self.retry.attempts,
            slo_ttft_ms=self.slo.ttft_ms,
            shadow=Shadow(self.shadow.policy, self.shadow.rate) if self.shadow else None,
            filters=tuple((name, cast(Filter, one)) for name, one in _chosen(self.filters)),
        )


def parse_policy(data: Mapping[str, Any]) -> Policy:
    """A policy from plain data. Raises pydantic's `ValidationError`."""
    return PolicySpec.model_validate(data).build()


def _chosen(choice: BaseModel) -> list[tuple[str, Any]]:
    return [(name, value) for name in type(choice).model_fields if (value := getattr(choice, name)) is not None]


__all__ = ["Policy", "PolicySpec", "Shadow", "ValidationError", "parse_policy"]
