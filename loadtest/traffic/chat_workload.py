"""Generates a seeded mix of chat sessions for the demo and load tests.

Each kind of session is a `SessionShape`: what its sessions share and how they grow. `MIX` is the demo's: chats with
their tenant's system prompt, questions about shared documents, agents in fast loops, one-off prompts. Sessions arrive
independently of the fleet; inside a session, the next turn follows the last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from loadtest.mock_engine.vocabulary import WORDS

_Turn: TypeAlias = dict[str, str]
_Span: TypeAlias = tuple[int, int]
"""(minimum, maximum), inclusive."""

WORDS_PER_SENTENCE = 12


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message, sent `think_s` after the last answer."""

    text: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChatSession:
    """One conversation. Its client pauses `read_pause_s` after each chunk of an answer."""

    id: str
    kind: str
    start_s: float
    system: str
    turns: tuple[Turn, ...]
    read_pause_s: float = 0.0

    def messages(self, answers: Sequence[str]) -> list[_Turn]:
        """The messages of the turn after `answers`: the whole conversation so far and the next message."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            chat += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": self.turns[len(answers)].text}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A pool of texts. Each session starts with the `preface` and `picked` different texts; text k has weight
    1/k^zipf, so 0 draws all equally."""

    texts: int
    words: _Span
    picked: int = 1
    zipf: float = 1.0
    preface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """A kind of session, in words (about one token each) and seconds. `share` is its weight among the kinds.

    `unique_first` starts every session with unique words, so nothing after them can be reused.
    """

    share: float
    first_words: _Span
    answer_tokens: _Span
    turns: _Span = (1, 1)
    next_words: _Span = (1, 1)
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
"""The demo's mix. Chats and agents have several requests each, so they make up most of the traffic."""


def sessions(seed: int, *, duration_s: float, sessions_per_s: float) -> list[ChatSession]:
    """The sessions of `MIX` that start within `duration_s`, in order. One seed gives the same sessions."""
    random = Random(seed)
    return mixed_sessions(random, MIX, poisson(random, duration_s, sessions_per_s))


def mixed_sessions(random: Random, shapes: Mapping[str, SessionShape], starts_s: Iterable[float]) -> list[ChatSession]:
    """One session for each start, in order. The shared texts are drawn first, kind by kind."""
    pools = {kind: _pool(random, shape.shared) for kind, shape in shapes.items() if shape.shared}
    weights = [shape.share for shape in shapes.values()]
    found = []
    for number, start_s in enumerate(starts_s):
        kind = random.choices(list(shapes), weights)[0]
        shape = shapes[kind]
        system = _system(random, shape, pools.get(kind, ()))
        found.append(ChatSession(f"s{number}", kind, start_s, system, tuple(_turns(random, shape)), shape.read_pause_s))
    return found


def _system(random: Random, shape: SessionShape, pool: Sequence[str]) -> str:
    parts = [f"Request {random.getrandbits(64):016x}."] if shape.unique_first else []
    if shape.shared is not None:
        parts += [shape.shared.preface] if shape.shared.preface else []
        parts += _picked(random, pool, shape.shared)
    return "\n\n".join(parts)


def _turns(random: Random, shape: SessionShape) -> Iterator[Turn]:
    for number in range(random.randint(*shape.turns)):
        words = random.randint(*(shape.next_words if number else shape.first_words))
        think_s = random.uniform(*shape.think_s) if number else 0.0
        yield Turn(prose(random, words), random.randint(*shape.answer_tokens), think_s)


def prose(random: Random, words: int) -> str:
    chosen = random.choices(WORDS, k=words)
    sentences = (chosen[at : at + WORDS_PER_SENTENCE] for at in range(0, words, WORDS_PER_SENTENCE))
    return " ".join(" ".join(sentence).capitalize() + "." for sentence in sentences)


def poisson(random: Random, duration_s: float, per_s: float) -> Iterator[float]:
    """Independent arrivals with a mean rate of `per_s`."""
    at_s = random.expovariate(per_s)
    while at_s < duration_s:
        yield at_s
        at_s += random.expovariate(per_s)


def _pool(random: Random, shared: Shared) -> list[str]:
    least, most = shared.words
    return [prose(random, random.randint(least, most) if most > least else least) for _ in range(shared.texts)]


def _picked(random: Random, pool: Sequence[str], shared: Shared) -> list[str]:
    """Different texts in the order drawn, or the whole pool in its own order."""
    if shared.picked >= len(pool):
        return list(pool)
    weights = [1 / rank**shared.zipf for rank in range(1, len(pool) + 1)]
    picked: dict[int, None] = {}
    while len(picked) < shared.picked:
        picked[random.choices(range(len(pool)), weights)[0]] = None
    return [pool[number] for number in picked]
