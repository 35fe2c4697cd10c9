"""The files of a release, each a function of the commit and of a time."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from ruamel.yaml import YAML

import router
from tests.helm.charts import CHART

ROOT = Path(__file__).parents[2]
VERSION = router.__version__
CONTEXT = ("Dockerfile", ".dockerignore", "image.lock", "pyproject.toml", "README.md", "LICENSE")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTEXT_FOLDERS = (*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], "policies", "config")
CHART_FILES = ("Chart.yaml", "values.yaml", "values.schema.json", "README.md", "RUNBOOK.md", "METRICS.md")
_LOCKED = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s;]+)(?P<rest>(?:\\\n|[^\n])*)")


def build(folder: Path, epoch: int) -> list[str]:
    """Write all files into the folder, and return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    _python_packages(folder, epoch)
    chart, context = f"warmroute-chart-{VERSION}.tgz", f"warmroute-image-{VERSION}.tar.gz"
    listed = [CHART / name for name in CHART_FILES] + _files(CHART / "templates") + _files(CHART / "files")
    _archive(folder / chart, listed, epoch, lambda path: f"warmroute/{path.relative_to(CHART)}")
    context_files = [ROOT / name for name in CONTEXT] + [path for one in CONTEXT_FOLDERS for path in _files(ROOT / one)]
    _archive(folder / context, context_files, epoch, lambda path: str(path.relative_to(ROOT)))
    _index(folder / "index.yaml", folder / chart, epoch)
    _bill_of_materials(folder / f"warmroute-{VERSION}.cdx.json", epoch)
    names = [f"warmroute-{VERSION}-py3-none-any.whl", f"warmroute-{VERSION}.tar.gz", chart, "index.yaml", context]
    names.append(f"warmroute-{VERSION}.cdx.json")
    sums = "".join(f"{_sha256(folder / name)}  {name}\n" for name in sorted(names))
    (folder / "SHA256SUMS").write_text(sums)
    return [*names, "SHA256SUMS"]


def _python_packages(folder: Path, epoch: int) -> None:
    """Wheel and source distribution: hatchling uses the time in the environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)


def _files(folder: Path) -> list[Path]:
    """Those of a folder; a file is itself."""
    found = [folder] if folder.is_file() else folder.rglob("*")
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _archive(target: Path, files: Iterable[Path], epoch: int, name: Callable[[Path], str]) -> None:
    """A tar archive of the files, sorted by name, of nobody, with one time and two modes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(files, key=name):
            entry = tarfile.TarInfo(name(path))
            entry.size, entry.mtime = path.stat().st_size, epoch
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
    target.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def _index(target: Path, chart: Path, epoch: int) -> None:
    """The index of a chart repository whose files are in one folder."""
    created = datetime.fromtimestamp(epoch, UTC).isoformat()
    described = YAML(typ="safe").load((CHART / "Chart.yaml").read_text())
    entry = {**described, "created": created, "digest": _sha256(chart), "urls": [chart.name]}
    with target.open("w") as file:
        YAML(typ="safe").dump({"apiVersion": "v1", "generated": created, "entries": {"warmroute": [entry]}}, file)


def _bill_of_materials(target: Path, epoch: int) -> None:
    """The packages of the image in CycloneDX: names, versions and hashes of `image.lock`."""
    components = [
        {
            "type": "library",
            "name": found["name"],
            "version": found["version"],
            "purl": f"pkg:pypi/{found['name'].lower()}@{found['version']}",
            "hashes": [{"alg": "SHA-256", "content": one} for one in re.findall(r"sha256:(\w+)", found["rest"])],
        }
        for found in _LOCKED.finditer((ROOT / "image.lock").read_text())
    ]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).isoformat(),
            "component": {"type": "application", "name": "warmroute", "version": VERSION},
        },
        "components": components,
    }
    target.write_text(json.dumps(bill, indent=1) + "\n")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
