"""Every peer is started in front of the given pods."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from loadtest.commands.child_processes import FleetPlan
from loadtest.peers import catalog
from loadtest.peers.catalog import PEERS, LaunchPlan, Pod, all_workers_healthy, nginx_conf, responds

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


def test_nginx_uses_the_given_directive_and_does_not_buffer(place: LaunchPlan) -> None:
    """Round robin needs no directive."""
    assert "least_conn;" in nginx_conf("least_conn;", place)
    assert "least_conn" not in nginx_conf("", place)
    assert "proxy_buffering off;" in nginx_conf("", place)


def test_our_router_gets_its_policy_and_pods(place: LaunchPlan) -> None:
    """One file, one option."""
    command = PEERS["warmroute-ring"].command(place)
    config = json.loads(Path(command[command.index("--config") + 1]).read_text())
    assert command[command.index("--policy") + 1] == "ring_bounded_load"
    assert [pod["url"] for pod in config["pods"]] == [pod.url for pod in PODS]


@pytest.mark.parametrize(
    ("status", "body", "ready"),
    [(200, {"healthy_workers": 2}, True), (200, {"healthy_workers": 1}, False), (503, {"healthy_workers": 2}, False)],
)
@pytest.mark.anyio
async def test_a_gateway_is_ready_when_all_workers_are_healthy(status: int, body: dict[str, int], ready: bool) -> None:
    """They respond before they have their workers."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))
    async with httpx.AsyncClient(base_url="http://peer", transport=transport) as client:
        assert await all_workers_healthy(client, 2) is ready


@pytest.mark.parametrize(("status", "ready"), [(200, True), (404, True), (502, False)])
@pytest.mark.anyio
async def test_a_proxy_without_health_checks_is_ready_when_it_responds(status: int, ready: bool) -> None:
    """A 404 of the pod shows that it forwards."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status))
    async with httpx.AsyncClient(base_url="http://peer", transport=transport) as client:
        assert await responds(client, 2) is ready
