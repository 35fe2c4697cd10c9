"""Settings that contradict each other are refused, with a hint at a valid setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from router.config.load import load
from router.config.schema import Receipts, RouterConfig
from router.engines.engine_catalog import DIALECTS, ENGINES, PULL_DIALECTS
from router.errors import ConfigError


def parsed(folder: Path, text: str) -> RouterConfig:
    """A router.yaml with this text."""
    file = folder / "router.yaml"
    file.write_text(text)
    return load(file, RouterConfig)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_prefill_or_decode_pod_needs_a_handoff_dialect(tmp_path: Path, role: str) -> None:
    """The message names file, line and the known dialects."""
    with pytest.raises(ConfigError, match=rf"router\.yaml:3: pods\.1: .*role: {role}.*`handoff: nixl`.*shared_store"):
        parsed(tmp_path, f"pods:\n- url: http://a\n- url: http://b\n  role: {role}\nlinks: {{elsewhere: rdma_100}}\n")


@pytest.mark.parametrize("moves", ["handoff: nixl", "handoff: nixl\n  role: decode", "pulls: p2p"])
def test_pods_that_exchange_kv_need_a_link(tmp_path: Path, moves: str) -> None:
    """A link class or its own figures."""
    pods = f"pods:\n- url: http://a\n  {moves}\n"
    with pytest.raises(ConfigError, match=r"links\.elsewhere: .*http://a.*`links: \{elsewhere: rdma_100\}`"):
        parsed(tmp_path, pods)
    for link in ("rdma_100", "{t0_ms: 0.4, gb_per_s: 12}"):
        assert parsed(tmp_path, f"{pods}links: {{elsewhere: {link}}}\n").links.elsewhere is not None


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_of_the_catalog_is_accepted(tmp_path: Path, name: str) -> None:
    """For every role."""
    pods = "".join(
        f"- {{url: 'http://{role}', role: {role}, handoff: {name}}}\n" for role in ("prefill", "decode", "both")
    )
    config = parsed(tmp_path, f"links: {{elsewhere: rdma_100}}\npods:\n{pods}")
    assert {pod.handoff for pod in config.pods} == {name}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_of_the_catalog_is_accepted(tmp_path: Path, engine: str) -> None:
    """The catalog is the only list of engines."""
    assert parsed(tmp_path, f"pods: [{{url: 'http://a', engine: {engine}}}]").pods[0].engine == engine


@pytest.mark.parametrize(
    ("key", "known"),
    [("engine", ENGINES), ("handoff", DIALECTS), ("pulls", PULL_DIALECTS)],
    ids=["engine", "handoff", "pulls"],
)
def test_an_unknown_engine_or_dialect_is_refused_with_the_known_ones(
    tmp_path: Path, key: str, known: tuple[str, ...]
) -> None:
    """With file, line and key."""
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, f"pods:\n- url: http://a\n  {key}: nonsense\n")
    assert f"router.yaml:3: pods.0.{key}: " in str(caught.value)
    assert "'nonsense'" not in str(caught.value)  # next to the pod's URL and key
    assert all(repr(name) in str(caught.value) for name in known)


def test_only_p2p_can_pull() -> None:
    """The catalog derives it from the dialects."""
    assert PULL_DIALECTS == ("p2p",)


@pytest.mark.parametrize("path", ["run/pod.sock", "/" + "x" * 107])
def test_an_invalid_socket_path_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    """An empty path means the network."""
    with pytest.raises(
        ConfigError, match=r"\A\S+router\.yaml:3: pods\.0\.socket: .*absolute path of at most 107[^\n]*\Z"
    ):
        parsed(tmp_path, f"pods:\n- url: http://a\n  socket: {path}\n")
    assert parsed(tmp_path, "pods:\n- url: http://a\n  socket: ''\n").pods[0].socket == ""


@pytest.mark.parametrize(
    ("section", "text"),
    [("models", "models: [{name: m}, {name: n}, {name: m}]"), ("pods", "pods: [{url: 'http://m'}, {url: 'http://m'}]")],
)
def test_duplicates_are_refused(tmp_path: Path, section: str, text: str) -> None:
    """Models by name, pods by URL."""
    with pytest.raises(ConfigError, match=rf"router.yaml:1: {section}\.\d\.(name|url): duplicate of {section}\.0\."):
        parsed(tmp_path, text)


@pytest.mark.parametrize(
    ("second", "line", "key"),
    [
        ("- url: https://h:1", 3, "url"),
        ("- url: http://g:1\n  id: h:1", 4, "id"),
        ("  dp_size: 2\n- url: http://g:1\n  id: h:1#1", 5, "id"),
    ],
)
def test_pods_with_equal_ids_are_refused(tmp_path: Path, second: str, line: int, key: str) -> None:
    """The default id is host, port and path of the URL, without the scheme."""
    what = rf"router\.yaml:{line}: pods\.1\.{key}: same pod id as pods\.0; set `id`"
    with pytest.raises(ConfigError, match=what):
        parsed(tmp_path, f"pods:\n- url: http://h:1\n{second}\n")


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ("r.jsonl", Receipts(file="r.jsonl")),
        (None, Receipts()),
        ({"keep": 5, "prompts": True}, Receipts(keep=5, prompts=True)),
    ],
)
def test_receipts_can_be_a_file_name_or_a_mapping(receipts: object, expected: Receipts) -> None:
    """Null means the defaults."""
    assert RouterConfig.model_validate({"receipts": receipts}).receipts == expected


def test_invalid_receipts_are_refused() -> None:
    """An unknown key."""
    with pytest.raises(ValidationError):
        RouterConfig.model_validate({"receipts": {"keeep": 5}})


@pytest.mark.parametrize(
    ("key", "path", "problem"),
    [
        ("extra_paths", "/reset_prefix_cache", r"changes the engine.*`control_paths`"),
        ("extra_paths", "/tokenize/", "must be a path"),
        ("extra_paths", "/metrics", "router itself"),
        ("extra_paths", "/v1/realtime", "websockets.*not routed: connect to a pod"),
        ("control_paths", "/admin/pods", "router itself"),
        ("control_paths", "/v1/load_lora_adapter", "on the admin listener"),
        ("passthrough_paths", "/tokenize", "unknown key"),
    ],
)
def test_paths_that_cannot_be_forwarded_are_refused(tmp_path: Path, key: str, path: str, problem: str) -> None:
    """A path that changes engines needs a key of its own, so that it is not enabled by mistake."""
    with pytest.raises(ConfigError, match=rf"router\.yaml:2: edge\.{key}.*{problem}"):
        parsed(tmp_path, f"edge:\n  {key}: [{path}]\n")
    both = parsed(tmp_path, "edge: {extra_paths: [/tokenize], control_paths: [/reset_prefix_cache]}").edge
    assert (both.extra_paths, both.control_paths) == (("/tokenize",), ("/reset_prefix_cache",))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Authorization", "lower case"),
        ("x y", "name of a header"),
        ("host", "set by the router"),
        ("x-forwarded-for", "set by the router"),
        ("connection", "set by the router"),
        ("x-data-parallel-rank", "trust_engine_fields"),
    ],
)
def test_headers_that_cannot_be_forwarded_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    """Those of one connection, and those that have another key."""
    with pytest.raises(ConfigError, match=rf"router\.yaml:1: edge\.forward_headers.*{problem}"):
        parsed(tmp_path, f"edge: {{forward_headers: ['{name}']}}\n")
    forwarded = parsed(tmp_path, "edge: {forward_headers: [authorization, cookie]}").edge.forward_headers
    assert forwarded == ("authorization", "cookie")


@pytest.mark.parametrize("name", ["", "x session", "x-session-id:", "é"])
def test_a_session_header_that_no_request_can_have_is_refused(tmp_path: Path, name: str) -> None:
    """With its place in the list."""
    with pytest.raises(ConfigError, match=r"session_headers.*must be the name of a header"):
        parsed(tmp_path, f"edge:\n  session_headers: [x-session-id, {name!r}]")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "router.example"])
def test_an_admin_listener_for_others_needs_a_token(tmp_path: Path, host: str) -> None:
    """Unless it is a Unix socket."""
    with pytest.raises(ConfigError, match=r"router\.yaml:1: admin\.bearer_file: .*required, because `host` is"):
        parsed(tmp_path, f"admin:\n  host: '{host}'\n")
    assert parsed(tmp_path, f"admin: {{host: '{host}', bearer_file: /run/token}}").admin.host == host
    assert parsed(tmp_path, f"admin: {{host: '{host}', socket: /run/admin.sock}}").admin.socket


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_an_admin_listener_for_this_machine_needs_no_token(tmp_path: Path, host: str) -> None:
    assert parsed(tmp_path, f"admin: {{host: '{host}'}}").admin.bearer_file is None


def test_several_workers_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """They were processes of one router once; one is what a router has."""
    assert parsed(tmp_path, "listen: {workers: 1}").listen.reuse_port is False
    with pytest.raises(
        ConfigError, match=r"router\.yaml:1: listen\.workers: .*start 4 with `listen: \{reuse_port: true"
    ):
        parsed(tmp_path, "listen: {workers: 4}")


@pytest.mark.parametrize("key", ["tenant_header: 'x tenant'", "tenant_header: ''", "session_headers: ['a:b']"])
def test_a_name_that_no_header_can_have_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="must be the name of a header"):
        parsed(tmp_path, f"edge: {{{key}}}")
