"""What kind of work is a request: chat, rag, agent, batch, long context, one-off?

A client may say it in a header; otherwise the first rule that fits does, by what stands in the request and by what its
prompt's prefix does: whether it grows from one that was seen, how soon, and what it shares with others. Classes choose
policies and slice metrics; nothing is refused by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from router.index.lineage import Lineage
from router.policy.match import HeaderPairs, Match
from router.types import Scene

ClassName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClassRule(_Section):
    """Requests of one class: all that is given must hold."""

    workload_class: Annotated[ClassName, Field(alias="class")]
    request: Match = Match()
    """As the `match` of a policy, but for the class itself."""
    min_turn: NonNegativeInt = 0
    """The prompt goes on from at least so many earlier ones."""
    max_gap_s: PositiveFloat | None = None
    """These came so closely after one another, on average."""
    min_shared_tokens: NonNegativeInt = 0
    """Another conversation's prompt began with so many of the same tokens."""

    @field_validator("request")
    @classmethod
    def _not_by_itself(cls, request: Match) -> Match:
        if request.workload_class is not None:
            raise ValueError("a class cannot depend on the class")
        return request


class ClassRules(_Section):
    """`config/classes.yaml`."""

    header: str = "x-workload-class"
    """Where a client may say it; empty: it may not. Names that are no class are ignored."""
    said: tuple[ClassName, ...] = ()
    """Classes that only a client can tell."""
    rules: Annotated[tuple[ClassRule, ...], Field(min_length=1)]
    """In this order; the last fits everything."""

    @model_validator(mode="after")
    def _something_always_fits(self) -> ClassRules:
        others = {"workload_class"}
        anything = ClassRule.model_validate({"class": "any"}).model_dump(exclude=others)
        if self.rules[-1].model_dump(exclude=others) != anything:
            raise ValueError("rules: the last one must have no conditions, so that every request has a class")
        return self

    @property
    def names(self) -> frozenset[str]:
        """All classes."""
        return frozenset(self.said) | {rule.workload_class for rule in self.rules}


class Classes:
    """The rules, and what was seen of prefixes."""

    def __init__(self, rules: ClassRules) -> None:
        self._rules = [_unpacked(rule) for rule in rules.rules]
        self._names = rules.names
        self._header = rules.header.lower().encode()
        self._lineage = Lineage()

    def classify(self, scene: Scene, *, prompt_tokens: int, headers: HeaderPairs, counted: bool = True) -> str:
        """The class of one request, and, where it is `counted`, take note of its prompt. O(blocks) at most, see
        `Lineage`. `prompt_tokens` may be an estimate."""
        request, prompt = scene.request, scene.prompt
        hashes: Sequence[int] = prompt.hashes if prompt else ()
        look = self._lineage.observe if counted else self._lineage.peek
        past = look(hashes, scene.now_s, scene.shared_blocks)
        said = self._said(headers)
        if said in self._names:
            return said
        shared_tokens = past.shared_blocks * prompt.block_size_tokens if prompt else 0
        turn, gap_s = past.turn, past.gap_s
        for name, min_turn, max_gap_s, min_shared_tokens, match in self._rules:
            fits = turn >= min_turn and gap_s <= max_gap_s and shared_tokens >= min_shared_tokens
            if fits and (match is None or match.covers(request, "", prompt_tokens, headers)):
                return name
        raise AssertionError("the last rule fits everything")

    def apply_remote(self, hashes: Sequence[int], now_s: float) -> None:
        """Record a prompt that another worker classified."""
        self._lineage.apply_remote(hashes, now_s)

    def _said(self, headers: HeaderPairs) -> str:
        wanted = self._header
        for name, value in headers if wanted else ():
            if name == wanted:
                return value.decode("latin-1")
        return ""


def _unpacked(rule: ClassRule) -> tuple[str, int, float, int, Match | None]:
    """Its class and its conditions, as `classify` reads them."""
    max_gap_s = inf if rule.max_gap_s is None else rule.max_gap_s
    match = rule.request if rule.request.conditions else None
    return rule.workload_class, rule.min_turn, max_gap_s, rule.min_shared_tokens, match
