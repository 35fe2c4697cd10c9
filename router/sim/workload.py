"""What do people and programs ask, one after another?

A seeded mix of sessions: chats that grow behind a system prompt of their tenant, questions about documents that many
ask about, agents in fast loops, one-off prompts. Sessions arrive as a Poisson process whatever the fleet does; inside
one, the next turn follows the answer to the last. This file only says what is asked: it never sends and never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeAlias

from router.sim.mock.words import WORDS

Message: TypeAlias = dict[str, str]
Span: TypeAlias = tuple[int, int]
"""Least and most, both possible."""

WORDS_PER_SENTENCE = 12


class Kind(StrEnum):
    """What a session is like."""

    CHAT = "chat"
    RAG = "rag"
    AGENT = "agent"
    ONEOFF = "one-off"


MIX: Mapping[Kind, float] = {Kind.CHAT: 0.40, Kind.RAG: 0.32, Kind.AGENT: 0.10, Kind.ONEOFF: 0.18}
"""Share of the sessions; a chat or an agent is several requests, so that they make most of the traffic."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said next, `think_s` after the last answer, and how long the answer may be."""

    text: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation that begins at `start_s`."""

    id: str
    kind: Kind
    start_s: float
    system: str
    turns: tuple[Turn, ...]

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The chat that asks for the turn after `answers`, with everything said so far."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": self.turns[len(answers)].text}]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a kind of session grows, in words (about as many tokens) and seconds."""

    turns: Span
    first_words: Span
    next_words: Span
    answer_tokens: Span
    think_s: tuple[float, float]


_SHAPES: Mapping[Kind, _Shape] = {
    Kind.CHAT: _Shape((3, 6), (120, 500), (60, 260), (24, 56), (0.3, 1.2)),
    Kind.RAG: _Shape((1, 2), (20, 60), (20, 60), (24, 48), (0.8, 2.0)),
    Kind.AGENT: _Shape((5, 8), (150, 300), (200, 450), (16, 40), (0.05, 0.2)),
    Kind.ONEOFF: _Shape((1, 1), (400, 1600), (1, 1), (24, 56), (0.0, 0.0)),
}
_TENANTS = 4
_TENANT_PROMPT_WORDS: Span = (500, 1200)
_DOCUMENTS = 16
_DOCUMENT_WORDS: Span = (1400, 2600)
_TOOLS_WORDS = 900


def sessions(seed: int, *, duration_s: float, sessions_per_s: float) -> list[Session]:
    """Every session that begins within `duration_s`, in order. The same seed gives the same sessions."""
    random = Random(seed)
    world = _World(random)
    starts_s = _poisson(random, duration_s, sessions_per_s)
    return [world.session(f"s{number}", start_s) for number, start_s in enumerate(starts_s)]


class _World:
    """What sessions share: the tenants' system prompts, the tools of the agents, the documents."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._tenants = [prose(random, random.randint(*_TENANT_PROMPT_WORDS)) for _ in range(_TENANTS)]
        self._documents = [prose(random, random.randint(*_DOCUMENT_WORDS)) for _ in range(_DOCUMENTS)]
        self._tools = prose(random, _TOOLS_WORDS)

    def session(self, name: str, start_s: float) -> Session:
        kind = self._random.choices(list(MIX), list(MIX.values()))[0]
        return Session(name, kind, start_s, self._system(kind), tuple(self._turns(_SHAPES[kind])))

    def _system(self, kind: Kind) -> str:
        """What stands before the conversation, drawn by Zipf's law where there is a choice."""
        if kind is Kind.CHAT:
            return _zipf(self._random, self._tenants)
        if kind is Kind.RAG:
            return f"Answer from this document.\n\n{_zipf(self._random, self._documents)}"
        return self._tools if kind is Kind.AGENT else ""

    def _turns(self, shape: _Shape) -> Iterator[Turn]:
        random = self._random
        for number in range(random.randint(*shape.turns)):
            words = random.randint(*(shape.next_words if number else shape.first_words))
            think_s = random.uniform(*shape.think_s) if number else 0.0
            yield Turn(prose(random, words), random.randint(*shape.answer_tokens), think_s)


def prose(random: Random, words: int) -> str:
    """That many words in sentences, with no meaning."""
    chosen = random.choices(WORDS, k=words)
    sentences = (chosen[at : at + WORDS_PER_SENTENCE] for at in range(0, words, WORDS_PER_SENTENCE))
    return " ".join(" ".join(sentence).capitalize() + "." for sentence in sentences)


def _zipf(random: Random, items: Sequence[str]) -> str:
    """Item k (from 1) with a weight of 1/k."""
    return random.choices(items, [1 / rank for rank in range(1, len(items) + 1)])[0]


def _poisson(random: Random, duration_s: float, per_s: float) -> Iterator[float]:
    at_s = random.expovariate(per_s)
    while at_s < duration_s:
        yield at_s
        at_s += random.expovariate(per_s)
