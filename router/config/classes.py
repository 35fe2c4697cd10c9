"""Which kinds of work are told apart?

Reads `config/classes.yaml`, or the file that the configuration names instead. This file never classifies.
"""

from __future__ import annotations

from pathlib import Path

from router.config.load import load
from router.config.shipped import shipped
from router.policy.classes import ClassRules


def load_classes(file: str | None) -> ClassRules:
    """The rules; the shipped ones without a file. Raises `ConfigError`."""
    return load(Path(file) if file else shipped("config") / "classes.yaml", ClassRules)
