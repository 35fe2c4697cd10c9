"""A release is built from one commit: the same bytes each time, under one version."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from router import __version__
from tests.helm.charts import MINIMAL, helm
from tests.release.artifacts import ROOT, build

EPOCH = 1_700_000_000


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Two builds in different folders, the second one after files were touched."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    names = build(first, EPOCH)
    for name in ("helm/values.yaml", "router/__init__.py", "config/router.yaml"):
        os.utime(ROOT / name)
    build(second, EPOCH)
    return first, second, names


def test_two_builds_are_equal(builds: tuple[Path, Path, list[str]]) -> None:
    first, second, names = builds
    assert not [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()]
    assert sorted(path.name for path in first.iterdir() if path.suffix != "") == sorted({*names} - {"SHA256SUMS"})


def test_the_archive_of_the_chart_renders_and_its_index_names_it(builds: tuple[Path, Path, list[str]]) -> None:
    folder = builds[0]
    (entry,) = YAML(typ="safe").load(folder / "index.yaml")["entries"]["warmroute"]
    rendered = helm("template", "r", folder / entry["urls"][0], values=MINIMAL)
    assert f"image: warmroute:{__version__}" in rendered
    assert entry["version"] == entry["appVersion"] == __version__
    lines = [line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert sums[entry["urls"][0]] == entry["digest"] and len(sums) == len(builds[2]) - 1


def test_the_context_of_the_image_has_what_the_dockerfile_copies(builds: tuple[Path, Path, list[str]]) -> None:
    with tarfile.open(builds[0] / f"warmroute-image-{__version__}.tar.gz") as archive:
        names = archive.getnames()
        assert {(one.mtime, one.uid, one.uname) for one in archive.getmembers()} == {(EPOCH, 0, "")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert sources and all(any(f"{name}/".startswith(f"{one}/") for name in names) for one in sources)


def test_the_bill_of_materials_lists_what_the_image_installs(builds: tuple[Path, Path, list[str]]) -> None:
    bill = json.loads((builds[0] / f"warmroute-{__version__}.cdx.json").read_text())
    found = {one["name"]: one for one in bill["components"]}
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "image.lock").read_text(), re.MULTILINE)
    assert set(found) == set(locked)
    assert all(one["hashes"] and len(one["hashes"][0]["content"]) == 64 for one in found.values())


def test_the_version_is_in_one_place() -> None:
    """`router/__init__.py`; the chart's is generated, and examples that name an image of the release agree."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named = re.compile(r"(?:warmroute:|VERSION=|^(?:version|appVersion): |^version = \")(\d+\.\d+\.\d+)", re.MULTILINE)
    texts = {
        name: (ROOT / name).read_text(errors="replace")
        for name in listed
        if name.endswith((".md", ".yaml", ".toml", "Dockerfile")) and not name.startswith("loadtest/results")
    }
    found = {(name, version) for name, text in texts.items() for version in named.findall(text)}
    assert {version for _, version in found} == {__version__}
    assert not [name for name, _ in found if name in ("pyproject.toml", "Dockerfile")]
