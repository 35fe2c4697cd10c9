"""Is every peer started in front of the pods that it is given?"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from loadtest.peers import catalog
from loadtest.peers.catalog import PEERS, Place, Pod, answers, counts_healthy_workers, nginx_conf
from router.cli.child_processes import FleetPlan

PODS = [Pod(f"http://127.0.0.1:{9000 + n}", f"tcp://127.0.0.1:{n}", f"tcp://127.0.0.1:{100 + n}") for n in range(2)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Two pods, with every program where its name says."""
    monkeypatch.setattr(catalog, "program", lambda environment: Path("/programs") / environment)
    monkeypatch.setattr(catalog, "free_port", lambda: 29000)
    return Place(8000, PODS, FleetPlan(pods=2, num_blocks=64), tmp_path)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_told_all_pods_and_its_port(name: str, place: Place) -> None:
    """On the command line, or in the file that it names."""
    command = PEERS[name].command(place)
    told = " ".join([*command, *(file.read_text() for file in place.folder.iterdir())])
    assert all(pod.url.removeprefix("http://") in told for pod in PODS)
    assert "8000" in told


def test_the_gateways_keep_their_default_policy_unless_their_name_says_another(place: Place) -> None:
    """Their users would."""
    assert "--policy" not in PEERS["sglang-router"].command(place)
    assert "--policy" not in PEERS["smg"].command(place)
    assert "prefix_hash" in PEERS["smg-prefix-hash"].command(place)


def test_the_kv_aware_router_is_told_where_each_pods_events_come_from(place: Place) -> None:
    """Worker by worker, both sockets."""
    command = PEERS["vllm-router-kv"].command(place)
    assert command.count("--kv-event-source") == command.count("--kv-event-replay-source") == 2
    assert "http://127.0.0.1:9001=tcp://127.0.0.1:1" in command
    assert "http://127.0.0.1:9001=tcp://127.0.0.1:101" in command


def test_nginx_balances_by_the_given_directive_and_holds_no_stream_back(place: Place) -> None:
    """Round robin is the absence of a directive."""
    assert "least_conn;" in nginx_conf("least_conn;", place)
    assert "least_conn" not in nginx_conf("", place)
    assert "proxy_buffering off;" in nginx_conf("", place)


def test_we_are_started_with_the_policy_and_the_pods_of_our_own_configuration(place: Place) -> None:
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
async def test_a_gateway_is_ready_when_it_counts_all_workers_as_healthy(
    status: int, body: dict[str, int], ready: bool
) -> None:
    """They serve before they know their workers."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))
    async with httpx.AsyncClient(base_url="http://peer", transport=transport) as client:
        assert await counts_healthy_workers(client, 2) is ready


@pytest.mark.parametrize(("status", "ready"), [(200, True), (404, True), (502, False)])
@pytest.mark.anyio
async def test_a_proxy_that_checks_nothing_is_ready_when_it_answers(status: int, ready: bool) -> None:
    """A pod's 404 came through it."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status))
    async with httpx.AsyncClient(base_url="http://peer", transport=transport) as client:
        assert await answers(client, 2) is ready
