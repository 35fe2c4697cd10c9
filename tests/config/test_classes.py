"""Which kinds of work are told apart, and what a mistake in saying so looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.classes import load_classes
from router.errors import ConfigError


def test_the_shipped_classes_are_those_that_the_handbook_names() -> None:
    """Without a file of one's own."""
    assert load_classes(None).names == {"chat", "rag", "agent", "batch", "long_context", "one_off"}


def test_a_file_of_ones_own_takes_their_place(tmp_path: Path) -> None:
    """Whole."""
    file = tmp_path / "classes.yaml"
    file.write_text("rules:\n- {class: vip, request: {tenant: acme}}\n- {class: rest}\n")
    assert load_classes(str(file)).names == {"vip", "rest"}


def test_a_mistake_names_file_line_and_key(tmp_path: Path) -> None:
    """And what was probably meant."""
    file = tmp_path / "classes.yaml"
    file.write_text("rules:\n- class: agent\n  min_turns: 2\n- class: rest\n")
    with pytest.raises(
        ConfigError, match=r"classes\.yaml:3: rules\.0\.min_turns: unknown key; did you mean 'min_turn'"
    ):
        load_classes(str(file))
