"""A prefill pod names its own host to decode pods, or those of its configuration."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.engines.handoff.addresses import MAX_DEPTH, PARAMETERS, foreign_address
from router.engines.handoff.vllm_connectors import Nixl
from tests.engines.handoff.test_vllm_connectors import ANSWER
from tests.kit.scenes import make_pod

OWN = "http://10.0.0.3:8000"


def found(params: dict[str, Any], url: str = OWN, hosts: tuple[str, ...] = ()) -> str:
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in params.items()}
    return foreign_address(raw, make_pod("p", url=url, handoff_hosts=hosts))


def deep(value: Any, levels: int) -> Any:
    return {"a": deep(value, levels - 1)} if levels else value


@pytest.mark.parametrize(
    "params",
    [
        {"remote_host": "10.0.0.66"},
        {"remote_host": "127.0.0.1"},
        {"remote_host": "10.0.0.3.evil"},
        {"remote_host": "10.0.0.3@evil"},
        {"remote_host": "10.0.0.3:80@evil:80"},
        {"remote_host": "10.0.0.3\\@evil"},
        {"remote_host": "10.0.0.3:1:2"},
        {"remote_host": 167772163},
        {"remote_host": ["10.0.0.3", "evil"]},
        {"remote_host": {"0": "evil"}},
        {"remote_addr": {"ip": "evil", "port": 5}},
        {"ctx_info_endpoint": "tcp://evil:5600"},
        {"ctx_info_endpoint": ["tcp://10.0.0.3:5600", "tcp://evil:5600"]},
        {"remote_bootstrap_addr": "http://evil:8998"},
        {"Bootstrap_Host": "evil"},
        {"of_a_later_release": {"peers": [{"remote_hosts": ["evil"]}]}},
        {"of_a_later_release": deep({"remote_host": "evil"}, MAX_DEPTH)},
        {"of_a_later_release": ["x"] * PARAMETERS.max_items + [{"remote_host": "evil"}]},
    ],
)
def test_other_hosts_are_found(params: dict[str, Any]) -> None:
    assert found({"remote_port": 5600, **params})


@pytest.mark.parametrize(
    ("url", "params"),
    [
        (OWN, {"remote_host": "10.0.0.3", "remote_port": 5600}),
        (OWN, {"remote_host": None, "ctx_info_endpoint": ""}),
        (OWN, {"ctx_info_endpoint": ["tcp://10.0.0.3:5600"], "ctx_request_id": 9, "tp_size": 1}),
        (OWN, {"remote_addr": {"ip": "10.0.0.3", "port": 5}}),
        (OWN, {"remote_block_ids": [[1, 2], [3]], "encoded_opaque_state": "http://evil"}),
        (OWN, {"remote_block_ids": [list(range(200_000))]}),
        ("http://[fd00::3]:8000", {"remote_host": "fd00::3", "ctx_info_endpoint": "tcp://[fd00::3]:5600"}),
        ("http://127.0.0.1:8000", {"remote_host": "localhost"}),
        ("http://prefill-0:8000", {"remote_host": "prefill-0"}),
    ],
)
def test_its_own_host_is_not(url: str, params: dict[str, Any]) -> None:
    assert not found(params, url)


def test_a_parameter_that_cannot_be_read_counts_as_one() -> None:
    nested = msgspec.Raw(b'{"a":' * 2000 + b'""' + b"}" * 2000)
    assert foreign_address({"of_a_later_release": nested}, make_pod("p", url=OWN))


def test_other_networks_of_a_pod_are_configured() -> None:
    params = {"remote_host": "192.168.7.3"}
    assert found(params) and not found(params, hosts=("192.168.7.3",))


def test_a_handoff_of_nixl_names_its_pod() -> None:
    handoff = Nixl().read_handoff(ANSWER)
    assert handoff is not None
    assert foreign_address(handoff.params, make_pod("p", url=OWN)) == ""
    assert foreign_address(handoff.params, make_pod("p", url="http://10.0.0.4:8000")) == "remote_host: 10.0.0.3"


@pytest.mark.parametrize(
    "params",
    [
        {f"p{number}": ["a"] for number in range(5000)},
        {f"p{number}": ["a"] * 3000 for number in range(2)},
        {f"p{number}": ["a" * 50_000] for number in range(2)},
        {"a" * 70_000: 1},
    ],
    ids=["names", "items", "bytes", "a long name"],
)
def test_all_parameters_are_searched_within_one_bound(params: dict[str, Any]) -> None:
    """Not each: there may be any number of them. What is not searched counts as a foreign address."""
    assert "at most" in found(params)


def test_block_ids_are_not_searched() -> None:
    """However long the prompt is."""
    params = {"remote_block_ids": [list(range(100_000))], "remote_host": "10.0.0.3"}
    assert found(params) == ""
