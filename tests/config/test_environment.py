"""Values of a configuration may refer to environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.load import load
from router.config.schema import RouterConfig
from router.errors import ConfigError

CANARY = "canary7sesame"


def loaded(folder: Path, text: str) -> RouterConfig:
    (folder / "router.yaml").write_text(text)
    return load(folder / "router.yaml", RouterConfig)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files, while variables are set."""
    for name, value in (("WARM_PORT", "8081"), ("WARM_EMPTY", ""), ("WARM_SECRET", CANARY), ("WARM_LOG", "json")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WARM_UNSET", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("${WARM_PORT}", "8081"),
        ("a-${WARM_PORT}-b", "a-8081-b"),
        ("${WARM_UNSET:-c}${WARM_EMPTY:-d}", "cd"),
        ("x${WARM_EMPTY}", "x"),
        ("${WARM_PORT:-c}", "8081"),
        ("${WARM_UNSET:-}x", "x"),
        ("$${WARM_PORT} $WARM_PORT", "${WARM_PORT} $WARM_PORT"),
    ],
)
def test_a_reference_is_replaced_by_its_value_or_default(folder: Path, value: str, policy: str) -> None:
    """As in a shell. Two dollar signs are a literal one."""
    assert loaded(folder, f"policy: {value}\n").policy == policy


def test_a_replaced_value_has_the_type_of_its_key(folder: Path) -> None:
    """Numbers, names, and items of lists."""
    config = loaded(
        folder, "listen: {port: '${WARM_PORT}'}\nlog: {format: '${WARM_LOG}'}\npods: [{url: 'http://${WARM_LOG}'}]\n"
    )
    assert (config.listen.port, config.log.format, config.pods[0].url) == (8081, "json", "http://json")


def test_all_unset_variables_are_reported_with_line_and_key(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, "policy: ${WARM_UNSET}\nlisten:\n  port: ${WARM_UNSET}\n")
    first, second = str(caught.value).splitlines()
    assert ":1: policy: environment variable WARM_UNSET is not set; set it, or write ${WARM_UNSET:-default}" in first
    assert ":3: listen.port: " in second


@pytest.mark.parametrize("value", ["${", "${}", "${WARM-PORT}", "${1}", "a ${WARM_PORT"])
def test_what_is_no_reference_is_refused_with_what_to_write(folder: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r":1: policy: `\$\{` must be followed by a name and `\}`"):
        loaded(folder, f"policy: '{value}'\n")


@pytest.mark.parametrize("text", ["listen: {port: '${WARM_SECRET}'}", "log: {format: 'x${WARM_SECRET}'}"])
def test_the_value_of_a_variable_is_not_printed(folder: Path, text: str) -> None:
    """It may be a secret in the wrong place."""
    with pytest.raises(ConfigError, match="not shown") as caught:
        loaded(folder, text)
    assert CANARY not in str(caught.value)
