"""How fast is this model on this hardware, before we have measured it?

Reads `config/models/*.yaml`. Online calibration replaces these numbers; this file never does.
"""

from __future__ import annotations

from pathlib import Path

from router.config.load import load
from router.config.schema import CostPrior, ModelPrior
from router.errors import ConfigError
from router.types import PodSpeed


def load_priors(folder: Path) -> dict[str, ModelPrior]:
    """All model priors by name. A file must be named after the model it describes."""
    priors = {}
    for path in sorted(folder.glob("*.yaml")):
        prior = load(path, ModelPrior)
        if prior.name != path.stem:
            raise ConfigError(f"{path}:1: name: {prior.name!r} must equal the file's name")
        priors[prior.name] = prior
    return priors


def prior_speed(priors: dict[str, ModelPrior], cost: CostPrior, hardware: str = "") -> PodSpeed:
    """Coefficients of `cost.model` on `hardware` (or on the prior's own)."""
    model = priors.get(cost.model)
    if model is None:
        raise ConfigError(f"cost.model: no prior named {cost.model!r}; known: {', '.join(sorted(priors))}")
    wanted = hardware or cost.hardware
    row = model.hardware.get(wanted)
    if row is None:
        known = ", ".join(sorted(model.hardware))
        raise ConfigError(f"hardware: no prior of {cost.model!r} on {wanted!r}; known: {known}")
    return row.speed()
