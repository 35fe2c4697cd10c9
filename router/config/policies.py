"""Which policies are there?

Reads a folder of policy files and the folders in it; a mistake names file, line and key. This file never decides which
of them is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from router.config.load import load
from router.errors import ConfigError
from router.policy.spec import Policy, PolicySpec


def load_policies(folder: Path) -> dict[str, Policy]:
    """All policies by name: those of the folder, then those one folder deeper. A file must be named after the policy
    that it describes, and no two alike."""
    policies: dict[str, Policy] = {}
    # A name with a leading dot is none of ours: a mounted ConfigMap keeps its versions in such folders.
    for path in (*sorted(folder.glob("*.yaml")), *sorted(folder.glob("[!.]*/*.yaml"))):
        spec = load(path, PolicySpec)
        if spec.name != path.stem:
            raise ConfigError(f"{path}:1: name: {spec.name!r} must equal the file's name")
        if spec.name in policies:
            raise ConfigError(f"{path}:1: name: there is another policy {spec.name!r}")
        policies[spec.name] = spec.build()
    return policies


def find_policy(policies: Mapping[str, Policy], name_or_file: str) -> Policy:
    """The policy of that name, or of that YAML file. Raises `ConfigError`."""
    if name_or_file.endswith((".yaml", ".yml")):
        return load(Path(name_or_file), PolicySpec).build()
    return choose_policy(policies, name_or_file)


def choose_policy(policies: Mapping[str, Policy], name: str) -> Policy:
    """The policy of that name, or a `ConfigError` that lists the others."""
    if name not in policies:
        raise ConfigError(f"policy: there is no policy {name!r}; known: {', '.join(sorted(policies))}")
    return policies[name]
