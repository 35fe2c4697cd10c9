"""Describes a working tree of this repository whose router a load test runs: this one, or one of another commit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from router.config.schema import RouterConfig

_KEYS = (
    "from router.config.schema import ModelConfig, RouterConfig; "
    "print(*RouterConfig.model_fields, *(f'models.{key}' for key in ModelConfig.model_fields))"
)
_PARITY_KEY = "feeds"
"""Until November 2026 the self-test was switched off with `feeds.parity`, not with `probes.self_test`."""
_SLO_KEY = "models.slo"
"""Until the end of November 2026 the SLO of all models was `admission.slo`."""


class UnknownSettings(Exception):
    """A load needs settings that the router of a checkout does not have."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A working tree, the Python that runs it, and the keys of its configuration: at the top level, and of models."""

    root: Path
    python: Path
    keys: frozenset[str]

    @classmethod
    def at(cls, root: Path, python: Path | None = None) -> Self:
        """The checkout at `root`. Without `python`: that of its own `.venv`, or the running one if it has none."""
        root, own = root.resolve(), root.resolve() / ".venv" / "bin" / "python"
        python = python or (own if own.exists() else Path(sys.executable))
        command = [str(python), "-c", _KEYS]
        known = os.environ | {"PYTHONPATH": str(root)}
        said = subprocess.run(command, cwd=root, env=known, capture_output=True, text=True, check=True)
        return cls(root, python, frozenset(said.stdout.split()))

    @property
    def has_admin_port(self) -> bool:
        """Whether operators have a listener of their own."""
        return "admin" in self.keys

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which its Python imports its own code, and not an installed checkout."""
        return {"PYTHONPATH": str(self.root)}

    def known(self, config: Mapping[str, object]) -> dict[str, object]:
        """The configuration in the keys of this checkout. Raises `UnknownSettings`."""
        found = dict(config)
        if _PARITY_KEY in self.keys and found.get("probes") == {"self_test": False}:
            del found["probes"]
            found[_PARITY_KEY] = {"parity": False}
        if _SLO_KEY not in self.keys and "models" in found:
            found |= _with_slo_of_the_queue(found)
        if unknown := sorted(found.keys() - self.keys):
            raise UnknownSettings(f"the router at {self.root} has no setting {', '.join(unknown)}")
        return found


def _with_slo_of_the_queue(config: Mapping[str, Any]) -> dict[str, object]:
    """Models without an SLO, and the queue with that of the first one that has one. Without a queue: none."""
    slos = [model["slo"] for model in config["models"] if model.get("slo")]
    models = [{key: value for key, value in model.items() if key != "slo"} for model in config["models"]]
    if not slos or config.get("admission") is None:
        return {"models": models}
    slo = {"tpot_ms": "inf", "idle_prefills": 0.0, **slos[0]}
    return {"models": models, "admission": {**config["admission"], "slo": slo}}


HERE = Checkout(Path(__file__).parents[2], Path(sys.executable), frozenset([*RouterConfig.model_fields, _SLO_KEY]))
