"""The chart's schema and its table of values follow from `values.yaml` and from the configuration of the router."""

from __future__ import annotations

from helm.generate import generated


def test_generated_files_of_the_chart_are_up_to_date() -> None:
    stale = [path.name for path, text in generated().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run: .venv/bin/python -m helm.generate (changes {', '.join(stale)})"
