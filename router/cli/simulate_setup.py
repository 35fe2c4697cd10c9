"""What is to be simulated?

Reads traffic, fleets, priors and policies for `simulate` and `plan`. This file never runs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from router.config.load import load
from router.config.policy_files import Shelf, load_policies
from router.config.priors import load_priors, prior_speed
from router.config.schema import CostPrior
from router.config.shipped import shipped
from router.errors import ConfigError
from router.policy.spec import Policy
from router.sim.virtual.compare import Experiment
from router.sim.virtual.generate import TrafficMix
from router.sim.virtual.scenario import FleetSpec
from router.sim.virtual.traces import (
    ReceiptLine,
    TraceRequest,
    azure_traffic,
    mooncake_traffic,
    read_mooncake,
    read_receipts,
    receipts_traffic,
)
from router.sim.virtual.traffic import Traffic
from router.types import PodSpeed

DEFAULT_FLEET = "fleets/llama-70b-h100.yaml"


@dataclass(frozen=True)
class Source:
    """Where traffic comes from: a Mooncake trace, our own receipts, an Azure CSV, or a YAML that describes a mix."""

    path: Path
    requests: int | None = None
    jitter_s: float = 0.0

    def __call__(self, speedup: float, seed: int) -> Traffic:
        """Raises `ConfigError`."""
        name = self.path.stem
        if self.path.suffix == ".jsonl" and _is_receipts(self.path):
            return receipts_traffic(_receipts(self.path, self.requests), speedup=speedup, name=name)
        if self.path.suffix == ".jsonl":
            trace = _trace(self.path, self.requests)
            return mooncake_traffic(trace, speedup=speedup, jitter_s=self.jitter_s, seed=seed, name=name)
        if self.path.suffix == ".csv":
            return azure_traffic(self.path, speedup=speedup, requests=self.requests)
        if self.path.suffix in (".yaml", ".yml"):
            return load(self.path, TrafficMix).traffic(speedup=speedup, seed=seed, name=name)
        raise ConfigError(
            f"{self.path}: traffic is a Mooncake trace or receipts (.jsonl), an Azure trace (.csv) or a mix (.yaml)"
        )


def _is_receipts(path: Path) -> bool:
    with path.open("rb") as lines:
        return b'"at_s"' in lines.readline()


@lru_cache(1)
def _receipts(path: Path, requests: int | None) -> Sequence[ReceiptLine]:
    return list(islice(read_receipts(path), requests))


@lru_cache(1)
def _trace(path: Path, requests: int | None) -> Sequence[TraceRequest]:
    return list(islice(read_mooncake(path), requests))


class ShippedPriors:
    """Coefficients of `config/models`."""

    def __init__(self) -> None:
        self._priors = load_priors(shipped("config") / "models")

    def __call__(self, model: str, hardware: str) -> tuple[PodSpeed, int]:
        """Raises `ConfigError`."""
        speed = prior_speed(self._priors, CostPrior(model=model, hardware=hardware))
        return speed, self._priors[model].kv_bytes_per_token


def simulated_shelf(folder: Path | None = None) -> Shelf:
    """The policy files of `folder`, in front of the peers' formulas and the shipped policies. Raises `ConfigError`.

    The peers are imported here because only simulations may use them."""
    from router.sim.peers.peer_policies import FOLDER, PeerPolicySpec

    peers = Shelf(FOLDER, spec=PeerPolicySpec)
    return peers if folder is None else Shelf(folder, spec=PeerPolicySpec, behind=peers)


def simulated_policies() -> dict[str, Policy]:
    """The shipped policies, then the peers' formulas, by name."""
    from router.sim.peers.peer_policies import FOLDER, PeerPolicySpec

    return load_policies(shipped("policies")) | load_policies(FOLDER, PeerPolicySpec)


def experiment(fleet: Path, source: Source) -> Experiment:
    """What the files say. Raises `ConfigError`."""
    return Experiment(load(fleet, FleetSpec), ShippedPriors(), simulated_policies(), source)
