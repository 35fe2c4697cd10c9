"""Mistakes in YAML files are reported with line, key and a similar valid key."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.load import load, read_document, shipped
from router.config.models import load_priors
from router.config.policy_files import find_policy, load_policies
from router.config.schema import RouterConfig
from router.errors import ConfigError


def refused(folder: Path, text: str) -> str:
    """The error message for a router.yaml with this text."""
    file = folder / "router.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, RouterConfig)
    return str(caught.value).replace(str(folder), "")


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("policy: x\nlimts: {}\n", "/router.yaml:2: limts", "did you mean 'limits'?"),
        ("limits:\n  retries: 2\n  max_body: 1\n", "/router.yaml:3: limits.max_body", "did you mean 'max_body_bytes'?"),
        ("pods:\n- url: http://a\n- url: b\n", "/router.yaml:3: pods.1.url", "http://host:port"),
        ("limits:\n  retries: many\n", "/router.yaml:2: limits.retries", "integer"),
        ("pods: [\n", "/router.yaml:", "not valid YAML"),
        ("policy: a\npolicy: b\n", "/router.yaml:2", "duplicate key"),
        ("listen:\n", "/router.yaml:1: listen", "mapping of keys"),
        ("- a\n", "/router.yaml:1: (top level)", "mapping of keys"),
        ("models:\n- name: m\n  cost:\n    modle: x\n", "/router.yaml:4: models.0.cost.modle", "did you mean 'model'?"),
        (
            "pods:\n- url: http://a\n  speed: {c0_ms: 1, c1_ms_per_token: 1, c2_ms_per_token2: 0,\n    d0_mss: 1}\n",
            "/router.yaml:4: pods.0.speed.d0_mss",
            "did you mean 'd0_ms'?",
        ),
        (
            "pods:\n- url: http://a\n  kv_events:\n    endpoint: tcp://x:1\n    replay_endpont: y\n",
            "/router.yaml:5: pods.0.kv_events",
            "did you mean 'replay_endpoint'?",
        ),
        (
            "pods:\n- url: http://a\n  kv_events: {endpoint: tcp://a}\n",
            "/router.yaml:3: pods.0.kv_events.endpoint",
            "needs HOST:PORT, with an IPv6 address in brackets",
        ),
        (
            "discovery: {kubernetes: {selector: a, api: {kubeconfig: b}}}\n",
            "/router.yaml:1: discovery.kubernetes.",
            "api.kubeconfig: was removed; run `kubectl proxy`",
        ),
        (
            "discovery:\n  kubernetes:\n  - service: vllm\n    selector: a\n",
            "/router.yaml:3: discovery.kubernetes.0.service",
            "was removed; write the `selector` of the Service, or name a headless one under `dns`",
        ),
        (
            "discovery:\n  kubernetes:\n    selector: a\n    deletion_cost: true\n",
            "/router.yaml:4: discovery.kubernetes.deletion_cost",
            "was removed; remove the key, and from each pod what it wrote: `kubectl annotate pods",
        ),
        (
            "admission:\n  max_requests: 9\n  slo: {ttft_ms: 500}\n",
            "/router.yaml:3: admission.slo",
            "was removed; write `slo: {ttft_ms: 2000, tpot_ms: 100, idle_prefills: 3}` at each entry of `models`",
        ),
        ("models:\n- name: m\n  slo: {ttft: 5}\n", "/router.yaml:3: models.0.slo.ttft", "did you mean 'ttft_ms'?"),
        ("receipts:\n  redis_maxlen: 5\n", "/router.yaml:2: receipts.redis_maxlen", "was removed; write `file`"),
        ("colour: red\n", "/router.yaml:1: colour", "valid keys: admin, admission, classes, continuation, discovery"),
        (
            "links:\n  cpu: {t0_ms: 1,\n    gb_per_ss: 3}\n",
            "/router.yaml:",
            "3: links.cpu.gb_per_ss: unknown key; did you mean 'gb_per_s'?",
        ),
        ("links:\n  elswhere: nvme\n", "/router.yaml:2: links.elswhere", "did you mean 'elsewhere'?"),
        ("pods:\n- url: http://a\n  handoff: nix\n", "/router.yaml:3: pods.0.handoff", "'nixl', 'mooncake'"),
        ("policy: 2024-13-45\n", "/router.yaml: not valid YAML", "form of a date"),
        ("policy: \x00\n", "/router.yaml: not valid YAML", "a control character"),
        ("policy: " + "[" * 400 + "]" * 400 + "\n", "/router.yaml: not valid YAML", "nested too deeply"),
        ("policy: !!int abc\n", "/router.yaml: not valid YAML", "does not match its tag"),
        ("policy: !!set x\n", "/router.yaml: not valid YAML", "does not match its tag"),
        ("? {a: 1}\n: b\n? {a: {}}\n", "/router.yaml: not valid YAML", "a key is no text"),
    ],
)
def test_a_mistake_is_reported_with_line_and_key(tmp_path: Path, text: str, where: str, what: str) -> None:
    """At any depth."""
    message = refused(tmp_path, text)
    assert message.startswith(where)
    assert what in message


def test_all_mistakes_are_listed(tmp_path: Path) -> None:
    """In one message."""
    assert len(refused(tmp_path, "polcy: a\nlimits:\n  retries: -1\n").splitlines()) == 2


def test_a_file_is_parsed_only_when_it_changed(tmp_path: Path) -> None:
    """A reload of many policies parses those that changed."""
    file = tmp_path / "router.yaml"
    file.write_text("policy: a\n")
    first = read_document(file)
    file.write_text("policy: a\n")
    assert read_document(file) is first
    file.write_text("policy: b\n")
    assert read_document(file).data == {"policy": "b"}


def test_an_empty_file_has_all_defaults(tmp_path: Path) -> None:
    """Also one with comments only."""
    file = tmp_path / "router.yaml"
    file.write_text("# nothing yet\n")
    assert load(file, RouterConfig) == RouterConfig()


@pytest.mark.parametrize("content", [None, b"policy: \xff\n"])
def test_an_unreadable_file_is_a_configuration_error(tmp_path: Path, content: bytes | None) -> None:
    """Missing, or not UTF-8."""
    file = tmp_path / "router.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"router\.yaml: cannot be read"):
        load(file, RouterConfig)


def test_a_policy_mistake_names_file_line_and_key(tmp_path: Path) -> None:
    """A file must be named after its policy."""
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nabout: x\ncosts:\n  queu: {}\npicker:\n  lowest_cost: {}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:4: costs\.queu: unknown key; did you mean 'queue'\?"):
        load_policies(tmp_path)
    file.write_text("name: yours\nabout: x\npicker:\n  lowest_cost: {}\n")
    with pytest.raises(ConfigError, match="'yours' must equal the file's name"):
        load_policies(tmp_path)


def test_the_annotated_defaults_are_the_defaults() -> None:
    """config/router.yaml equals the schema."""
    assert load(shipped("config") / "router.yaml", RouterConfig) == RouterConfig()


def test_all_shipped_files_load() -> None:
    """Policies and priors."""
    policies = load_policies(shipped("policies"))
    assert set(policies) >= {"round_robin", "least_load", "ring_bounded_load", "cost_aware"}
    assert load_priors(shipped("config") / "models")["llama-3.1-8b"].hardware["h100x1"].c1_ms_per_token > 0
    with pytest.raises(ConfigError, match="cost_aware"):
        find_policy(policies, "cost_awre")


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    """Ten in each of nine lines are a billion values."""
    lines = [f"- &a{number + 1} [{', '.join([f'*a{number}'] * 10)}]" for number in range(9)]
    path = tmp_path / "router.yaml"
    path.write_text("\n".join(["laughs:", "- &a0 [1]", *lines]))
    with pytest.raises(ConfigError, match="an alias counts as all values that it stands for"):
        read_document(path)


def test_changes_replace_or_add_values_before_the_file_is_validated(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("pods: [{url: http://a}]\nlisten: {port: 1}\n")
    changed = load(path, RouterConfig, ["pods.0.url=http://b", "listen.port=2", "admin.port=3"])
    assert (changed.pods[0].url, changed.listen.port, changed.admin.port) == ("http://b", 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("listen.port", "listen.port: cannot be set: expected KEY=VALUE"),
        ("pods.9.url=http://b", "pods.9.url=http://b: cannot be set: list index out of range"),
        ("listen=[", "listen=[: cannot be set: "),
    ],
)
def test_a_change_that_cannot_be_made_is_named(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("pods: [{url: http://a}]\n")
    with pytest.raises(ConfigError) as refused:
        load(path, RouterConfig, [change])
    assert str(refused.value).startswith(message)
