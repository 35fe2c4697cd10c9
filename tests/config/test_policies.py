"""Which policies a folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.policies import load_policies
from router.config.shipped import shipped
from router.errors import ConfigError


def write(file: Path, name: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"name: {name}\nabout: x\npicker:\n  lowest_cost: {{}}\n")


def test_the_peers_are_shipped_beside_ours_and_known_by_name() -> None:
    """Ours first."""
    names = list(load_policies(shipped("policies")))
    assert names[:5] == ["cost_aware", "cost_aware_pd", "least_load", "ring_bounded_load", "round_robin"]
    assert {"dynamo", "lmetric", "mooncake_conductor", "random"} <= set(names[5:])


def test_folders_with_a_leading_dot_are_not_read(tmp_path: Path) -> None:
    """A mounted ConfigMap keeps the same files there once more."""
    write(tmp_path / "mine.yaml", "mine")
    write(tmp_path / "..2026_01_01" / "mine.yaml", "mine")
    write(tmp_path / "others" / "theirs.yaml", "theirs")
    assert list(load_policies(tmp_path)) == ["mine", "theirs"]


def test_two_policies_of_one_name_are_refused(tmp_path: Path) -> None:
    """The message names the second file."""
    write(tmp_path / "mine.yaml", "mine")
    write(tmp_path / "others" / "mine.yaml", "mine")
    with pytest.raises(ConfigError, match=r"others.mine\.yaml:1: name: there is another policy 'mine'"):
        load_policies(tmp_path)
