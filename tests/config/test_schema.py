"""What only makes sense together is refused apart, with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from router.config.load import load
from router.config.schema import HandoffName, RouterConfig
from router.errors import ConfigError


def parsed(folder: Path, text: str) -> RouterConfig:
    """A router.yaml of this text."""
    file = folder / "router.yaml"
    file.write_text(text)
    return load(file, RouterConfig)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_half_a_pair_must_say_how_it_hands_over(tmp_path: Path, role: str) -> None:
    """The message says what could be written, and where."""
    with pytest.raises(ConfigError, match=rf"router\.yaml:3: pods\.1: .*role: {role}.*`handoff: nixl`.*shared_store"):
        parsed(tmp_path, f"pods:\n- url: http://a\n- url: http://b\n  role: {role}\nlinks: {{elsewhere: rdma_100}}\n")


@pytest.mark.parametrize("moves", ["handoff: nixl", "handoff: nixl\n  role: decode", "pulls: p2p"])
def test_kv_that_moves_between_pods_needs_a_way(tmp_path: Path, moves: str) -> None:
    """The message says what to write; a class and figures of its own both will do."""
    pods = f"pods:\n- url: http://a\n  {moves}\n"
    with pytest.raises(ConfigError, match=r"links\.elsewhere: .*http://a.*`links: \{elsewhere: rdma_100\}`"):
        parsed(tmp_path, pods)
    for way in ("rdma_100", "{t0_ms: 0.4, gb_per_s: 12}"):
        assert parsed(tmp_path, f"{pods}links: {{elsewhere: {way}}}\n").links.elsewhere is not None


@pytest.mark.parametrize("name", get_args(HandoffName))
def test_every_dialect_can_be_written(tmp_path: Path, name: str) -> None:
    """For prefill, for decode, and for a pod that does both."""
    pods = "".join(
        f"- {{url: 'http://{role}', role: {role}, handoff: {name}}}\n" for role in ("prefill", "decode", "both")
    )
    config = parsed(tmp_path, f"links: {{elsewhere: rdma_100}}\npods:\n{pods}")
    assert {pod.handoff for pod in config.pods} == {name}


@pytest.mark.parametrize("path", ["run/pod.sock", "/" + "x" * 107])
def test_a_socket_that_cannot_be_one_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    """Where nothing stands, the pod is reached over the network."""
    with pytest.raises(
        ConfigError, match=r"\A\S+router\.yaml:3: pods\.0\.socket: .*absolute path of at most 107[^\n]*\Z"
    ):
        parsed(tmp_path, f"pods:\n- url: http://a\n  socket: {path}\n")
    assert parsed(tmp_path, "pods:\n- url: http://a\n  socket: ''\n").pods[0].socket == ""
