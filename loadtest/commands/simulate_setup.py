"""Reads what a simulation needs: fleet, traffic, cost priors and policies, by path or by the name of a shipped file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from loadtest.simulator.agent_sessions import agent_traffic, read_agent_sessions
from loadtest.simulator.compare import DEFAULT_SLO, Experiment
from loadtest.simulator.generate import TrafficMix
from loadtest.simulator.scenario import FleetSpec
from loadtest.simulator.traffic import (
    Traffic,
    mooncake_traffic,
    read_mooncake,
    read_receipts,
    receipts_traffic,
)
from router.admission.tenant import Slo
from router.cli.receipt_files import LineT
from router.config.load import load, shipped, validate_options
from router.config.models import load_priors, prior_speed
from router.config.policy_files import load_policies
from router.config.schema import CostPrior, ModelConfig, RouterConfig
from router.config.tenant_file import TenantFile
from router.errors import ConfigError
from router.types import PodSpeed

DEFAULT_FLEET = Path("llama-70b-h100")
MAX_FIRST_LINE_BYTES = 1 << 20
"""How much of a JSONL file is read to recognize its format."""


@dataclass(frozen=True)
class Source:
    """A file of traffic: a Mooncake trace, our own receipts, agent sessions, or a YAML file of a mix."""

    path: Path
    requests: int | None = None
    jitter_s: float = 0.0

    def __call__(self, speedup: float, seed: int) -> Traffic:
        """Raises `ConfigError`."""
        if self.path.suffix == ".jsonl":
            return self._recorded(speedup, seed)
        if self.path.suffix in (".yaml", ".yml"):
            if self.requests is not None:
                raise ConfigError(f"{self.path}: --requests is for traces; shorten `duration_s` in a copy of the mix")
            return load(self.path, TrafficMix).traffic(speedup=speedup, seed=seed)
        raise ConfigError(
            f"{self.path}: unknown kind of traffic; use a Mooncake trace, receipts or agent sessions (.jsonl) or a mix "
            "(.yaml). The prompts of an Azure trace (.csv) share nothing: a mix can have its lengths"
        )

    def _recorded(self, speedup: float, seed: int) -> Traffic:
        """A JSONL file; its first line shows the format."""
        with self.path.open("rb") as lines:
            first = lines.readline(MAX_FIRST_LINE_BYTES)
        if b'"at_s"' in first:
            return receipts_traffic(_read(read_receipts, self.path)[: self.requests], speedup=speedup)
        if b'"block_tokens"' in first:
            sessions = _read(read_agent_sessions, self.path)[: self.requests]
            return agent_traffic(sessions, speedup=speedup, seed=seed)
        trace = _read(read_mooncake, self.path)[: self.requests]
        return mooncake_traffic(trace, speedup=speedup, jitter_s=self.jitter_s, seed=seed)


@lru_cache(1)
def _read(read: Callable[[Path], list[LineT]], path: Path) -> list[LineT]:
    return read(path)


@cache
def shipped_prior(model: str, hardware: str) -> tuple[PodSpeed, int]:
    """Coefficients and KV bytes per token of `config/models`. Raises `ConfigError`."""
    priors = load_priors(shipped("config") / "models")
    speed = prior_speed(priors, CostPrior(model=model, hardware=hardware))
    return speed, priors[model].kv_bytes_per_token


def experiment(fleet: Path, source: Source, changes: Sequence[str] = (), tenants: Path | None = None) -> Experiment:
    """The fleet with `changes`, a file of tenants, priors, policies and traffic. Raises `ConfigError`."""
    spec = load(_found(fleet, "fleets"), FleetSpec, changes)
    source = replace(source, path=_found(source.path, "traffic"))
    traffic = source(1.0, 0)  # raises before anything is computed
    if tenants is not None:
        spec = _with_tenants(spec, tenants, traffic)
    return Experiment(spec, shipped_prior, load_policies(shipped("policies")), source)


def slo_of(config: Path | None, row: str, changes: str) -> Slo:
    """The SLO of the first model in router.yaml that has one and this row of `config/models`; without a file
    `DEFAULT_SLO`. `changes`: other limits, such as `ttft_ms=500,tpot_ms=50`. Raises `ConfigError`."""
    models = load(config, RouterConfig).models if config else ()
    found = next((model.slo for model in models if model.slo and model.cost_row.model == row), None)
    if config and not found:
        raise ConfigError(f"{config}: add `slo` to the model with `cost: {{model: {row}}}`, which is that of the fleet")
    given = dict(one.strip().partition("=")[::2] for one in changes.split(",") if one)
    limits = asdict(found or DEFAULT_SLO) | given
    return validate_options(ModelConfig, {"name": row, "slo": limits}).slo or DEFAULT_SLO


def _with_tenants(spec: FleetSpec, path: Path, traffic: Traffic) -> FleetSpec:
    """Raises `ConfigError` if none of them sends any of the traffic."""
    by_name = TenantFile(path).read().by_name
    if all(session.kind not in by_name for session in traffic.sessions):
        raise ConfigError(f"{path}: no tenant has the name of a kind of session in the traffic")
    return spec.model_copy(update={"admission": replace(spec.admission, tenants=by_name)})


def _found(path: Path, kind: str) -> Path:
    """The file, or the shipped one: `mixed`, `mixed.yaml`, or `config/traffic/mixed.yaml` as in a checkout."""
    folder = shipped("config") / kind
    if path.exists():
        return path
    if path.parent in (Path(), Path("config") / kind) and (folder / f"{path.stem}.yaml").is_file():
        return folder / f"{path.stem}.yaml"
    known = ", ".join(sorted(one.stem for one in folder.glob("*.yaml")))
    raise ConfigError(f"{path}: cannot be read: file not found; shipped {kind}: {known}")
