"""A wrong file is named with its line, its key, and what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.load import load
from router.config.policies import choose_policy, load_policies
from router.config.priors import load_priors
from router.config.schema import RouterConfig
from router.config.shipped import shipped
from router.errors import ConfigError


def refused(folder: Path, text: str) -> str:
    """The message for a router.yaml of this text."""
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
    ],
)
def test_a_mistake_is_named_with_line_and_key(tmp_path: Path, text: str, where: str, what: str) -> None:
    """At any depth."""
    message = refused(tmp_path, text)
    assert message.startswith(where)
    assert what in message


def test_the_annotated_defaults_are_the_defaults() -> None:
    """config/router.yaml says what the schema does."""
    assert load(shipped("config") / "router.yaml", RouterConfig) == RouterConfig()


def test_everything_that_is_shipped_loads() -> None:
    """All policies and all priors."""
    policies = load_policies(shipped("policies"))
    assert set(policies) >= {"round_robin", "least_load", "ring_bounded_load", "cost_aware"}
    assert load_priors(shipped("config") / "models")["llama-3.1-8b"].hardware["h100x1"].c1_ms_per_token > 0
    with pytest.raises(ConfigError, match="cost_aware"):
        choose_policy(policies, "cost_awre")
