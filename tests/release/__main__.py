"""`make release`: builds what a release consists of into a folder, twice, and installs each in a clean environment.

Wheel, source distribution, chart archive with its index, the context of the image, and a bill of materials. Two builds
of one commit are equal, byte for byte: archives are sorted, without owners, and carry the time of the commit
(`SOURCE_DATE_EPOCH`).
Nothing is published: `.github/workflows/release.yml` does that.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.release.artifacts import ROOT, VERSION, build


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    parser.add_argument("--no-install", action="store_true", help="Build only.")
    options = parser.parse_args()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _output("git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as again:
        names = build(options.folder, epoch)
        build(Path(again), epoch)
        _, different, missing = filecmp.cmpfiles(options.folder, again, names, shallow=False)
        if different or missing:
            sys.exit(f"two builds differ: {', '.join((*different, *missing))}")
    if not options.no_install:
        check(options.folder)
    for name in names:
        print(options.folder / name)


def check(folder: Path) -> None:
    """Install the wheel with the tested versions, then the source distribution in its place, and use both; render the
    archive of the chart; install from the context of the image."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        venv.create(scratch / "venv", with_pip=True)
        program, python = scratch / "venv" / "bin" / "warmroute", scratch / "venv" / "bin" / "python"
        context = scratch / "context"
        context.mkdir()
        _output("tar", "-xzf", str(folder / f"warmroute-image-{VERSION}.tar.gz"), "-C", str(context))
        pip = (str(python), "-m", "pip", "install", "-q")
        wheel = folder / f"warmroute-{VERSION}-py3-none-any.whl"
        _output(*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[demo]")
        for source in (None, folder / f"warmroute-{VERSION}.tar.gz", context):
            if source is not None:
                _output(*pip, "--no-deps", "--force-reinstall", str(source))
            found = _output(str(program), "--version", folder=scratch)
            assert found == f"warmroute {VERSION}", found
            assert "cost_aware" in _output(str(program), "policy", "list", folder=scratch)
        from tests.helm.charts import MINIMAL, helm

        rendered = helm("template", "r", folder / f"warmroute-chart-{VERSION}.tgz", values=MINIMAL)
        assert f"image: warmroute:{VERSION}" in rendered


def _output(*command: str, folder: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}: {ended.stdout}{ended.stderr}")
    return ended.stdout.strip()


if __name__ == "__main__":
    main()
