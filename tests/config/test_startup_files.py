"""Files that changed on disk after the router has read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.schema import ModelConfig, RouterConfig
from router.config.watched_file import GONE, RESTART, StartupFiles


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "router.yaml"
    found.write_text("policy: cost_aware\n")
    return found


def replace(file: Path, text: str) -> None:
    """As editors and `kubectl` do: another file under the same name."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def test_a_file_that_is_as_it_was_read_is_not_stale(file: Path) -> None:
    """Also if it was written again with the same content."""
    files = StartupFiles(RouterConfig(), file)
    assert files.changed() == []
    replace(file, file.read_text())
    assert files.changed() == []


def test_a_changed_file_is_stale_since_its_change_until_it_is_as_before(file: Path) -> None:
    files, before = StartupFiles(RouterConfig(), file), file.read_text()
    replace(file, "policy: ring_bounded_load\n")
    (found,) = files.changed()
    assert (found.file, found.problem) == (str(file), RESTART)
    assert found.since_s == pytest.approx(file.stat().st_ctime)
    assert files.changed() == [found]
    replace(file, before)
    assert files.changed() == []


def test_a_missing_file_is_stale_since_it_was_missed(file: Path) -> None:
    files, before = StartupFiles(RouterConfig(), file), file.read_text()
    file.unlink()
    (found,) = files.changed()
    assert found.problem == GONE and files.changed() == [found]
    file.write_text(before)
    assert files.changed() == []


def test_files_that_the_configuration_names_count_as_well(tmp_path: Path) -> None:
    """Classes, chat templates, and priors, also new ones."""
    for name in ("classes.yaml", "chat.jinja", "priors/mine.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    model = ModelConfig(name="m", chat_template=str(tmp_path / "chat.jinja"))
    classes, priors = str(tmp_path / "classes.yaml"), str(tmp_path / "priors")
    files = StartupFiles(RouterConfig(models=(model,), classes=classes, priors=priors), None)
    assert files.changed() == []
    for name in ("classes.yaml", "chat.jinja", "priors/mine.yaml", "priors/other.yaml"):
        (tmp_path / name).write_text("longer")  # the time of a change may be that of a write some milliseconds before
    assert sorted(Path(one.file).name for one in files.changed()) == [
        "chat.jinja", "classes.yaml", "mine.yaml", "other.yaml",
    ]  # fmt: skip


def test_a_router_without_a_file_has_nothing_stale() -> None:
    assert StartupFiles(RouterConfig(), None).changed() == []
