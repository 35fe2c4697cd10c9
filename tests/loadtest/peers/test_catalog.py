"""Every peer is started in front of the given pods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.commands.child_processes import FleetPlan
from loadtest.peers import catalog
from loadtest.peers.catalog import PEERS, LaunchPlan, Pod

PODS = [Pod(f"http://127.0.0.1:{9000 + n}", f"tcp://127.0.0.1:{n}", f"tcp://127.0.0.1:{100 + n}") for n in range(2)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    """Two pods, and programs at the paths of their names."""
    monkeypatch.setattr(catalog, "program", lambda environment: Path("/programs") / environment)
    monkeypatch.setattr(catalog, "free_port", lambda: 29000)
    return LaunchPlan(8000, PODS, FleetPlan(pods=2, num_blocks=64), tmp_path, 8001)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_gets_all_pods_and_its_port(name: str, place: LaunchPlan) -> None:
    """On the command line, or in its configuration file."""
    command = PEERS[name].command(place)
    given = " ".join([*command, *(file.read_text() for file in place.folder.iterdir())])
    assert all(pod.url.removeprefix("http://") in given for pod in PODS)
    assert "8000" in given


def test_gateways_keep_their_default_policy_unless_their_name_states_another(place: LaunchPlan) -> None:
    assert "--policy" not in PEERS["sglang-router"].command(place)
    assert "--policy" not in PEERS["smg"].command(place)
    assert "prefix_hash" in PEERS["smg-prefix-hash"].command(place)


def test_the_kv_aware_router_gets_the_event_sockets_of_each_pod(place: LaunchPlan) -> None:
    """Both sockets of each pod."""
    command = PEERS["vllm-router-kv"].command(place)
    assert command.count("--kv-event-source") == command.count("--kv-event-replay-source") == 2
    assert "http://127.0.0.1:9001=tcp://127.0.0.1:1" in command
    assert "http://127.0.0.1:9001=tcp://127.0.0.1:101" in command


def test_our_router_gets_its_policy_and_pods(place: LaunchPlan) -> None:
    """One file, one option."""
    command = PEERS["warmroute-ring"].command(place)
    config = json.loads(Path(command[command.index("--config") + 1]).read_text())
    assert command[command.index("--policy") + 1] == "ring_bounded_load"
    assert [pod["url"] for pod in config["pods"]] == [pod.url for pod in PODS]
