"""Which class of work is a request: chat, rag, agent, batch, long context, one-off?

A client may name the class in a header. Otherwise the first matching rule decides, by the request and by its prefix:
whether the prompt continues an earlier one, how soon, and what it shares with others. Classes select policies and are a
label of metrics; no request is refused because of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from router.index.lineage import Lineage
from router.policy.match import HeaderPairs, Match
from router.policy.term import Configurable
from router.types import Scene

ClassName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class ClassRule(Configurable):
    """The conditions of one class; all that are given must hold."""

    workload_class: Annotated[ClassName, Field(alias="class")]
    request: Match = Match()
    """As `match` of a policy, without `class`."""
    min_turn: NonNegativeInt = 0
    """Earlier prompts that this prompt continues, at least."""
    max_gap_s: PositiveFloat | None = None
    """Maximum mean time between these prompts."""
    min_shared_tokens: NonNegativeInt = 0
    """Leading tokens in common with a prompt of another conversation, at least."""

    @field_validator("request")
    @classmethod
    def _not_by_itself(cls, request: Match) -> Match:
        if request.workload_class is not None:
            raise ValueError("a class cannot depend on the class")
        return request


class ClassRules(Configurable):
    """`config/classes.yaml`."""

    header: str = "x-workload-class"
    """Request header with the name of a class; empty for none. Unknown names are ignored."""
    client_only: tuple[ClassName, ...] = ()
    """Classes that only a client can name."""
    rules: Annotated[tuple[ClassRule, ...], Field(min_length=1)]
    """Tried in this order; the last one has no conditions."""

    @model_validator(mode="after")
    def _last_rule_matches_all(self) -> ClassRules:
        others = {"workload_class"}
        anything = ClassRule.model_validate({"class": "any"}).model_dump(exclude=others)
        if self.rules[-1].model_dump(exclude=others) != anything:
            raise ValueError("rules: the last rule must have no conditions, so that every request has a class")
        return self

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.client_only) | {rule.workload_class for rule in self.rules}


class Classes:
    """Classifies requests by the rules and by the prompts seen so far."""

    def __init__(self, rules: ClassRules) -> None:
        self._rules = [_unpacked(rule) for rule in rules.rules]
        self._names = rules.names
        self._header = rules.header.lower().encode()
        self._lineage = Lineage()

    def classify(self, scene: Scene, *, prompt_tokens: int, headers: HeaderPairs, counted: bool = True) -> str:
        """The class of one request; its prompt is recorded if it is `counted`. At most O(blocks), see `Lineage`.
        `prompt_tokens` may be an estimate."""
        request, prompt = scene.request, scene.prompt
        hashes: Sequence[int] = prompt.hashes if prompt else ()
        look = self._lineage.observe if counted else self._lineage.peek
        past = look(hashes, scene.now_s, scene.shared_blocks)
        named = self._named(headers)
        if named in self._names:
            return named
        shared_tokens = past.shared_blocks * prompt.block_size_tokens if prompt else 0
        turn, gap_s = past.turn, past.gap_s
        for name, min_turn, max_gap_s, min_shared_tokens, min_tokens, match in self._rules:
            if (
                turn >= min_turn
                and gap_s <= max_gap_s
                and shared_tokens >= min_shared_tokens
                and prompt_tokens >= min_tokens
                and (match is None or match.matches(request, "", prompt_tokens, headers))
            ):
                return name
        raise AssertionError("the last rule has no conditions")

    def _named(self, headers: HeaderPairs) -> str:
        """The value of the first header that may name a class; empty without one."""
        if not self._header:
            return ""
        return dict(reversed(headers)).get(self._header, b"").decode("latin-1")


def _unpacked(rule: ClassRule) -> tuple[str, int, float, int, int, Match | None]:
    """Its class and conditions as `classify` reads them. The least length is tested first: most prompts are shorter."""
    max_gap_s = inf if rule.max_gap_s is None else rule.max_gap_s
    min_tokens = rule.request.prompt_tokens.min if rule.request.prompt_tokens else 0
    match = rule.request if rule.request.conditions else None
    return rule.workload_class, rule.min_turn, max_gap_s, rule.min_shared_tokens, min_tokens, match
