"""Do the tests of a package notice a changed line? `make mutants`, or:

    python -m tests.mutants --sample 200 --seed 1 policy fleet index proxy api prompt

Draws random mutants (a comparison, operator, branch, constant or call changed) from the named packages of `router/`,
runs each package's own tests against a copy of the tree, and prints the mutants that no test noticed. A survivor is
either a missing test or a mutant that behaves the same. Takes minutes to hours; not part of CI.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutants.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
CORE = ("policy", "fleet", "index", "proxy", "api", "prompt")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", ".hypothesis", "results")


def sample(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn evenly from all mutation points of the packages."""
    files = [path for package in packages for path in sorted((ROOT / "router" / package).rglob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(path.relative_to(ROOT), path.read_text())]
    return random.Random(seed).sample(every, min(count, len(every)))


def is_killed(mutant: Mutant, tree: Path, timeout_s: float) -> bool:
    """Whether the package's own tests fail or time out on the mutant. `tree` is a copy that this call may change."""
    source = tree / mutant.path
    original = source.read_text()
    source.write_text(mutant.source)
    package = mutant.path.parts[1]
    mirrored = sorted((tree / "tests" / package).rglob(f"test_{mutant.path.stem}.py"))
    try:
        first = _pytest(tree, [str(path) for path in mirrored], timeout_s) if mirrored else 0
        return first != 0 or _pytest(tree, [f"tests/{package}"], timeout_s) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        source.write_text(original)


def _pytest(tree: Path, paths: Sequence[str], timeout_s: float) -> int:
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *paths]
    return subprocess.run(
        command, cwd=tree, env=environment, timeout=timeout_s, check=False, capture_output=True
    ).returncode


def main() -> int:
    """Exit code 0 even with survivors: they are for people to judge. 2 when the tests fail without a mutant."""
    options = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    options.add_argument("packages", nargs="*", default=CORE)
    options.add_argument("--sample", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--timeout-s", type=float, default=180.0, help="longest run of a package's tests")
    given = options.parse_args()
    chosen = sample(given.packages, given.sample, given.seed)
    with TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(given.jobs):
            tree = Path(shutil.copytree(ROOT, Path(folder) / str(job), ignore=NOT_COPIED))
            trees.put(tree)
        for package in {mutant.path.parts[1] for mutant in chosen}:
            if _pytest(tree, [f"tests/{package}"], given.timeout_s) != 0:
                print(f"tests/{package} fails without a mutant: mend it first")
                return 2

        def run(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                killed = is_killed(mutant, tree, given.timeout_s)
            finally:
                trees.put(tree)
            print("killed  " if killed else "SURVIVED", mutant, flush=True)
            return killed

        with ThreadPoolExecutor(given.jobs) as jobs:
            verdicts = list(jobs.map(run, chosen))
    report(chosen, verdicts)
    return 0


def report(chosen: Sequence[Mutant], verdicts: Sequence[bool]) -> None:
    """A line a package, then the survivors."""
    for package in sorted({mutant.path.parts[1] for mutant in chosen}):
        own = [killed for mutant, killed in zip(chosen, verdicts, strict=True) if mutant.path.parts[1] == package]
        print(f"{package:10} {sum(own):3} of {len(own):3} killed")
    print(f"{'all':10} {sum(verdicts):3} of {len(verdicts):3} killed; survivors:")
    for mutant, killed in zip(chosen, verdicts, strict=True):
        if not killed:
            print(f"  {mutant}")


if __name__ == "__main__":
    sys.exit(main())
