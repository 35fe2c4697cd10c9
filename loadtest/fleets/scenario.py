"""Scenario files: what is requested, how often, and what a good response is.

A scenario is one YAML file in `loadtest/fleets/scenarios/`: kinds of sessions with their shares, an arrival process, a
duration, an objective, and the fleet to start. Unknown keys and invalid values are errors with file, line and key. The
same seed gives the same sessions; another rate gives the same sessions at other times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from loadtest.commands.child_processes import FleetPlan
from loadtest.fleets.record import Objective
from loadtest.traffic.chat_workload import ChatSession, SessionShape, Shared, mixed_sessions, poisson
from router.config.load import Strict, load
from router.errors import ConfigError

SCENARIOS = Path(__file__).parent / "scenarios"


def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= span[0] <= span[1]:
        raise ValueError("a span is [min, max], neither below 0")
    return span


Words: TypeAlias = Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(_ordered)]
Seconds: TypeAlias = Annotated[tuple[float, float], AfterValidator(_ordered)]


# --- arrivals ---


class Poisson(Strict):
    """Independent sessions, `per_s` a second on average."""

    process: Literal["poisson"]
    per_s: PositiveFloat

    def starts_s(self, random: Random, duration_s: float) -> Iterator[float]:
        """Start times in order."""
        return poisson(random, duration_s, self.per_s)


class Bursts(Strict):
    """All sessions of each `every_s` start within `within_s`; `per_s` on average."""

    process: Literal["bursts"]
    per_s: PositiveFloat
    every_s: PositiveFloat
    within_s: PositiveFloat = 0.1

    def starts_s(self, random: Random, duration_s: float) -> Iterator[float]:
        """Start times in order."""
        size = max(round(self.per_s * self.every_s), 1)
        bursts_s = [burst * self.every_s for burst in range(math.ceil(duration_s / self.every_s))]
        starts_s = [at_s + random.uniform(0, self.within_s) for at_s in bursts_s for _ in range(size)]
        return iter(sorted(at_s for at_s in starts_s if at_s < duration_s))


class Steps(Strict):
    """A Poisson process whose rate changes: `per_s` times each of `times`, each for an equal part of the run."""

    process: Literal["steps"]
    per_s: PositiveFloat
    times: list[PositiveFloat] = Field(min_length=1)

    def starts_s(self, random: Random, duration_s: float) -> Iterator[float]:
        """Start times in order."""
        part_s = duration_s / len(self.times)
        for number, factor in enumerate(self.times):
            yield from (number * part_s + at_s for at_s in poisson(random, part_s, self.per_s * factor))


Arrivals: TypeAlias = Annotated[Poisson | Bursts | Steps, Field(discriminator="process")]


# --- sessions ---


class SharedText(Strict):
    """A pool of texts; each session starts with `picked` of them, after `preface`."""

    texts: PositiveInt
    words: Words
    picked: PositiveInt = 1
    zipf: float = Field(default=1.0, ge=0)
    preface: str = ""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.picked > self.texts:
            raise ValueError(f"picked: {self.picked} of {self.texts} texts")
        return self


class Kind(Strict):
    """Sessions of one kind; see `loadtest/traffic/chat_workload.py`."""

    share: PositiveFloat
    turns: Words = (1, 1)
    first_words: Words
    next_words: Words = (1, 1)
    answer_tokens: Words
    think_s: Seconds = (0.0, 0.0)
    shared: SharedText | None = None
    unique_first: bool = False
    read_pause_s: float = Field(default=0.0, ge=0)

    def shape(self) -> SessionShape:
        """The kind for the session generator."""
        shared = Shared(**dict(self.shared)) if self.shared else None
        return SessionShape(**{**dict(self), "shared": shared})


class Good(Strict):
    """Objective of a good response; a missing bound is not checked."""

    ttft_ms: PositiveFloat = float("inf")
    tpot_ms: PositiveFloat = float("inf")


class Fleet(Strict):
    """Mock engines that are started without a URL, with the speed of a row of config/models."""

    pods: PositiveInt = 4
    num_blocks: PositiveInt = 2560
    model: str = "llama-3.1-70b"
    hardware: str = "h100x4"


class Scenario(Strict):
    """One scenario file."""

    name: str
    about: str
    seed: int = 1
    duration_s: PositiveFloat
    arrivals: Arrivals
    sessions: dict[str, Kind] = Field(min_length=1)
    objective: Good = Good()
    fleet: Fleet = Fleet()

    def at(self, *, rate_per_s: float | None = None, duration_s: float | None = None, seed: int | None = None) -> Self:
        """The same scenario with another rate of sessions, duration or seed."""
        changed = {"duration_s": duration_s, "seed": seed}
        arrivals = self.arrivals if rate_per_s is None else self.arrivals.model_copy(update={"per_s": rate_per_s})
        given = {key: value for key, value in changed.items() if value is not None}
        return self.model_copy(update={**given, "arrivals": arrivals})

    def drawn(self) -> list[ChatSession]:
        """All sessions, in order of their start."""
        shapes: Mapping[str, SessionShape] = {name: kind.shape() for name, kind in self.sessions.items()}
        starts_s = self.arrivals.starts_s(Random(f"{self.seed} arrivals"), self.duration_s)
        return mixed_sessions(Random(self.seed), shapes, starts_s)

    def good(self) -> Objective:
        """The objective for `figures`."""
        return Objective(**dict(self.objective))

    def plan(self, pods: int | None = None) -> FleetPlan:
        """The fleet to start."""
        return FleetPlan(
            pods=pods or self.fleet.pods,
            num_blocks=self.fleet.num_blocks,
            speed_model=self.fleet.model,
            speed_hardware=self.fleet.hardware,
        )


def load_scenario(name: str) -> Scenario:
    """Load a file, or a scenario of this folder by name. Raises `ConfigError`."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else SCENARIOS / f"{name}.yaml"
    if not path.exists():
        raise ConfigError(f"{path}: no such scenario; known: {', '.join(ours())}")
    scenario = load(path, Scenario)
    if path.parent == SCENARIOS and scenario.name != path.stem:
        raise ConfigError(f"{path}:1: name: {scenario.name!r} must equal the file's name")
    return scenario


def ours() -> list[str]:
    """Names of the scenarios in this folder."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
