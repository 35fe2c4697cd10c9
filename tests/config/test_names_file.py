"""The file of names, and its mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.admission.names import ModelName, NameRule, Names
from router.config.names_file import MAX_NAMES, read_names
from router.errors import ConfigError


def read(folder: Path, text: str) -> Names:
    (folder / "names.yaml").write_text(text)
    return read_names(folder / "names.yaml")


def test_names_are_what_the_file_says(tmp_path: Path) -> None:
    text = """
names:
- {name: gpt-4o, to: qwen}
- name: canary
  to: {qwen: 95, next: 5}
  rules: [{tenants: [acme], headers: {X-Beta: "1"}, to: next}]
- {name: c*, to: qwen}
- {name: claude-*, to: next}
"""
    rule = NameRule({"next": 1}, frozenset({"acme"}), ((b"x-beta", b"1"),))
    assert read(tmp_path, text) == Names(
        {"gpt-4o": ModelName("gpt-4o", {"qwen": 1}), "canary": ModelName("canary", {"qwen": 95, "next": 5}, (rule,))},
        (("claude-", ModelName("claude-*", {"next": 1})), ("c", ModelName("c*", {"qwen": 1}))),
        frozenset({"qwen", "next"}),
    )


def test_a_file_has_no_names_only_if_it_says_so(tmp_path: Path) -> None:
    """One that lost its content, or is written by a program that has just begun, takes none away."""
    assert read(tmp_path, "names: []") == Names()
    with pytest.raises(ConfigError, match=r"names.yaml:1: names: is required"):
        read(tmp_path, "")


def test_a_pipe_holds_up_nobody(tmp_path: Path) -> None:
    """Its reader would wait for a writer, and see no further change."""
    os.mkfifo(tmp_path / "names.yaml")
    with pytest.raises(ConfigError, match=r"names.yaml: is a pipe"):
        read_names(tmp_path / "names.yaml")


def test_a_name_may_be_that_of_one_of_its_own_models(tmp_path: Path) -> None:
    """A canary for clients that ask for the model."""
    canary = "{name: qwen, to: {qwen: 95, next: 5}}"
    assert read(tmp_path, f"names: [{canary}]").exact.keys() == {"qwen"}
    assert read(tmp_path, f"names: [{{name: gpt, to: qwen}}, {canary}]").exact["gpt"].weights == {"qwen": 1}


@pytest.mark.parametrize("to", ["to: p", "to: m, rules: [{tenants: [t], to: {m: 1, p: 1}}]"])
def test_a_provider_is_only_a_fallback(tmp_path: Path, to: str) -> None:
    """No rule, header or weight chooses one while pods serve."""
    file = tmp_path / "names.yaml"
    file.write_text("names:\n- {name: a, to: m, fallbacks: [p]}")
    assert read_names(file, ["p"]).exact["a"].fallbacks == ("p",)
    file.write_text(f"names:\n- {{name: a, {to}}}")
    with pytest.raises(ConfigError, match=r"names.yaml:2: names.0.(rules.0.)?to: 'p' is a provider, which may only be"):
        read_names(file, ["p"])


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("names:\n- {name: a, to: b}\n- {name: b, to: a}", "2: names.0.to: 'b' is a name of this file"),
        (
            "names:\n- name: a\n  to: m\n  rules:\n  - {tenants: [t], to: b}\n- {name: b, to: m}",
            "5: names.0.rules.0.to",
        ),
        ("names:\n- {name: a, to: m}\n- {name: a, to: n}", "3: names.1.name: duplicate of names.0.name"),
        ("names:\n- {name: a*b, to: m}", "2: names.0.name: `\\*` may only be its last character"),
        ("names:\n- {name: a, to: m*}", "2: names.0.to: a target is a model, without `\\*`"),
        ("names:\n- {name: a, to: m, fallbacks: [b]}\n- {name: b, to: m}", "2: names.0.fallbacks: 'b' is a name"),
        ("names:\n- {name: a, to: {m: 0}}", "2: names.0.to: one weight must be above 0"),
        ("names:\n- {name: a, to: {m: -1}}", "2: names.0.to.m: must be greater than or equal to 0"),
        ("names:\n- {name: a, to: {m: .inf}}", "2: names.0.to.m"),
        ("names:\n- {name: a, to: {}}", "2: names.0.to"),
        ("names:\n- {name: a, to: m, rules: [{to: n}]}", "2: names.0.rules.0: a rule needs `tenants` or `headers`"),
        ("names:\n- {name: a, to: m, rules: [{headers: {'x y': z}, to: n}]}", "2: names.0.rules.0.headers"),
        ("names:\n- {name: a, too: m}", "2: names.0.too: .*did you mean 'to'"),
        ("version: 2\nnames: []", "1: version: must be 1"),
        (f"names: [{', '.join(f'{{name: n{number}, to: m}}' for number in range(MAX_NAMES + 1))}]", "1: names"),
    ],
)
def test_a_mistake_names_file_line_and_key(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(ConfigError, match=f"names.yaml:{mistake}"):
        read(tmp_path, text)
