"""Peers' formulas are available to simulations only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.simulate import simulated_library, simulated_policies
from router.config.load import shipped
from router.config.policy_files import PolicyFolder, load_policies
from router.errors import ConfigError
from router.sim.peers.peer_pickers import PEER_PICKERS
from tests.policy.scenes import POLICIES

MINE = "name: mine\nabout: x\npicker: {dynamo: {prefill_load_scale: 2}}\n"


def test_serve_does_not_import_the_peers() -> None:
    """Not even indirectly."""
    code = "import sys, router.cli; sys.exit(any(name.startswith('router.sim.peers') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_serve_refuses_a_peers_picker(tmp_path: Path) -> None:
    """As any unknown key."""
    (tmp_path / "mine.yaml").write_text(MINE)
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: picker\.dynamo: unknown key"):
        PolicyFolder(tmp_path, "mine").read()


def test_a_simulated_policy_may_use_and_extend_a_peers(tmp_path: Path) -> None:
    """With other settings."""
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "eager.yaml").write_text("name: eager\nabout: x\nextends: llm_d\nshortlist: 3\n")
    shelf = simulated_library(tmp_path)
    assert repr(shelf.policy("mine").picker) == "Dynamo(prefill_load_scale=2.0)"
    assert shelf.policy("eager").picker == POLICIES["llm_d"].picker


def test_every_peer_has_a_policy_and_ours_keep_their_version() -> None:
    """A simulated decision carries the version that the router would give it."""
    policies, ours = simulated_policies(), load_policies(shipped("policies"))
    assert {type(policy.picker) for policy in policies.values()} >= set(PEER_PICKERS.values())
    shelf = simulated_library()
    assert {name: shelf.policy(name).version for name in ours} == {
        name: policy.version for name, policy in ours.items()
    }
