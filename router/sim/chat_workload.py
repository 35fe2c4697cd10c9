"""What do people and programs ask, one after another?

A seeded mix of sessions of named kinds. Each kind is a `SessionShape`: what its sessions share and how they grow. `MIX`
is the demo's: chats with their tenant's system prompt, questions about shared documents, agents in fast loops, one-off
prompts. Sessions arrive independently of the fleet; inside a session, the next turn follows the last answer. This
module only generates requests: it never sends and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from router.sim.mock.vocabulary import WORDS

Message: TypeAlias = dict[str, str]
Span: TypeAlias = tuple[int, int]
"""Least and most, both possible."""

WORDS_PER_SENTENCE = 12


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said next, `think_s` after the last answer, and how long the answer may be."""

    text: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChatSession:
    """One conversation that begins at `start_s`. Its client pauses `read_pause_s` after each piece of an answer."""

    id: str
    kind: str
    start_s: float
    system: str
    turns: tuple[Turn, ...]
    read_pause_s: float = 0.0

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The chat that asks for the turn after `answers`, with everything said so far."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": self.turns[len(answers)].text}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A pool of texts, of which each session puts `picked` different ones first, behind the `preface`. Text number k is
    drawn with a weight of 1/k^zipf: 0 draws all alike."""

    texts: int
    words: Span
    picked: int = 1
    zipf: float = 1.0
    preface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """A kind of session, in words (about as many tokens) and seconds. `share` is its weight among the kinds.

    `unique_first` begins every session with words that no other has, which spoils whatever it shares behind them.
    """

    share: float
    first_words: Span
    answer_tokens: Span
    turns: Span = (1, 1)
    next_words: Span = (1, 1)
    think_s: tuple[float, float] = (0.0, 0.0)
    shared: Shared | None = None
    unique_first: bool = False
    read_pause_s: float = 0.0


MIX: Mapping[str, SessionShape] = {
    "chat": SessionShape(
        share=0.40,
        shared=Shared(texts=4, words=(500, 1200)),
        turns=(3, 6),
        first_words=(120, 500),
        next_words=(60, 260),
        answer_tokens=(24, 56),
        think_s=(0.3, 1.2),
    ),
    "rag": SessionShape(
        share=0.32,
        shared=Shared(texts=16, words=(1400, 2600), preface="Answer from this document."),
        turns=(1, 2),
        first_words=(20, 60),
        next_words=(20, 60),
        answer_tokens=(24, 48),
        think_s=(0.8, 2.0),
    ),
    "agent": SessionShape(
        share=0.10,
        shared=Shared(texts=1, words=(900, 900)),
        turns=(5, 8),
        first_words=(150, 300),
        next_words=(200, 450),
        answer_tokens=(16, 40),
        think_s=(0.05, 0.2),
    ),
    "one-off": SessionShape(share=0.18, first_words=(400, 1600), answer_tokens=(24, 56)),
}
"""What the demo plays. A chat or an agent is several requests, so that they make most of the traffic."""


def sessions(seed: int, *, duration_s: float, sessions_per_s: float) -> list[ChatSession]:
    """The demo's mix: every session that begins within `duration_s`, in order. One seed gives the same sessions."""
    random = Random(seed)
    mix = SessionMix(random, MIX)
    return mix.sessions(poisson(random, duration_s, sessions_per_s))


class SessionMix:
    """Draws sessions. The texts that they share are drawn first, kind by kind."""

    def __init__(self, random: Random, shapes: Mapping[str, SessionShape]) -> None:
        self._random = random
        self._shapes = shapes
        self._pools = {kind: _pool(random, shape.shared) for kind, shape in shapes.items() if shape.shared}

    def sessions(self, starts_s: Iterable[float]) -> list[ChatSession]:
        """One for each start, in order."""
        return [self._session(f"s{number}", start_s) for number, start_s in enumerate(starts_s)]

    def _session(self, name: str, start_s: float) -> ChatSession:
        weights = [shape.share for shape in self._shapes.values()]
        kind = self._random.choices(list(self._shapes), weights)[0]
        shape = self._shapes[kind]
        system = self._system(kind, shape)
        return ChatSession(name, kind, start_s, system, tuple(self._turns(shape)), shape.read_pause_s)

    def _system(self, kind: str, shape: SessionShape) -> str:
        """What stands before the conversation."""
        parts = [f"Request {self._random.getrandbits(64):016x}."] if shape.unique_first else []
        if shape.shared is not None:
            parts += [shape.shared.preface] if shape.shared.preface else []
            parts += _picked(self._random, self._pools[kind], shape.shared)
        return "\n\n".join(parts)

    def _turns(self, shape: SessionShape) -> Iterator[Turn]:
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


def poisson(random: Random, duration_s: float, per_s: float) -> Iterator[float]:
    """Arrivals that know nothing of each other, so many a second on average."""
    at_s = random.expovariate(per_s)
    while at_s < duration_s:
        yield at_s
        at_s += random.expovariate(per_s)


def _pool(random: Random, shared: Shared) -> list[str]:
    least, most = shared.words
    return [prose(random, random.randint(least, most) if most > least else least) for _ in range(shared.texts)]


def _picked(random: Random, pool: Sequence[str], shared: Shared) -> list[str]:
    """Different texts in the order drawn, the most popular most often first; in the pool's order where it is all."""
    if shared.picked >= len(pool):
        return list(pool)
    weights = [1 / rank**shared.zipf for rank in range(1, len(pool) + 1)]
    picked: dict[int, None] = {}
    while len(picked) < shared.picked:
        picked[random.choices(range(len(pool)), weights)[0]] = None
    return [pool[number] for number in picked]
