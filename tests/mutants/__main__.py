"""Do the tests of a package notice a changed line? `make mutants`, or:

    python -m tests.mutants --sample 300 --seed 1                        # of all packages
    python -m tests.mutants --sample 200 policy fleet frontends/http
    python -m tests.mutants --sample 300 --router OTHER/router           # the same sample as of another commit's tests
    python -m tests.mutants --again OUTPUT                               # the survivors of a former run

Draws random mutants (a comparison, operator, branch, constant or call changed) from the named packages of `router/`,
runs each package's own tests against a copy of the tree, and prints the mutants that no test noticed. A survivor is
either a missing test or a mutant that behaves the same. Takes minutes to hours; not part of CI.

`--router` draws from the `router/` of another commit, and keeps what that commit and this one have in common: a change
of tests is judged by the same mutants before and after it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutants.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", ".hypothesis", "results")
# Where the tests of a package do not have its name, or not all of them.
TESTS = {
    "admission": ("admission", "golden"),
    "apis": ("request", "api"),
    "fleet": ("fleet", "golden"),
    "index": ("index", "golden", "stores", "parity"),
    "observe": ("observe", "proxy"),
    "policy": ("policy", "golden"),
    "prompt": ("prompt", "parity"),
    "request": ("request", "golden"),
    "frontends": ("proxy", "api"),
    "frontends/admin": ("api",),
    "frontends/extproc": ("extproc",),
    "wiring": ("wiring", "cli"),
}


def packages(router: Path) -> list[str]:
    """All packages of `router/`."""
    return sorted(path.parent.name for path in router.glob("*/__init__.py"))


def folders_of(path: Path) -> list[str]:
    """The folders of tests that answer for a file, `router/PACKAGE/...`: what `TESTS` says of its innermost folder."""
    within = [parent.as_posix().removeprefix("router/") for parent in path.parents]
    named = next((TESTS[folder] for folder in within if folder in TESTS), (path.parts[1],))
    return [f"tests/{folder}" for folder in named]


def sample(
    names: Sequence[str], count: int, seed: int, router: Path = ROOT / "router", other: Path | None = None
) -> list[Mutant]:
    """`count` mutants of `router`, drawn evenly from all mutation points of the packages, that `other` has too.

    With the two exchanged, the same mutants are drawn.
    """
    here = _places(router, names)
    common = sorted(here.keys() & _places(other, names).keys() if other else here.keys())
    return [here[place] for place in random.Random(seed).sample(common, min(count, len(common)))]


def survivors(output: str) -> list[Mutant]:
    """The mutants that a former run's output calls survivors, where their lines are as they were. Of equal
    changes in one line, all."""
    named = {line.removeprefix("SURVIVED ") for line in output.splitlines() if line.startswith("SURVIVED ")}
    places = _places(ROOT / "router", packages(ROOT / "router")).values()
    return [mutant for mutant in places if str(mutant) in named]


def _places(router: Path, names: Sequence[str]) -> dict[tuple[str, str, str, int], Mutant]:
    """All mutants by file, text before and after, and how many such stand above it in the file."""
    places: dict[tuple[str, str, str, int], Mutant] = {}
    for path in (path for name in names for path in (router / name).rglob("*.py")):
        above: Counter[tuple[str, str]] = Counter()
        for mutant in mutants_of(path.relative_to(router.parent), path.read_text()):
            change = (mutant.before, mutant.after)
            places[mutant.path.as_posix(), *change, above[change]] = mutant
            above[change] += 1
    return places


def is_killed(mutant: Mutant, tree: Path, timeout_s: float) -> bool:
    """Whether the package's own tests fail or time out on the mutant. `tree` is a copy that this call may change."""
    source = tree / mutant.path
    original = source.read_text()
    source.write_text(mutant.applied(original))
    folders = folders_of(mutant.path)
    mirrored = sorted(path for folder in folders for path in (tree / folder).rglob(f"test_{mutant.path.stem}.py"))
    try:
        first = _pytest(tree, [str(path) for path in mirrored], timeout_s) if mirrored else 0
        return first != 0 or _pytest(tree, folders, timeout_s) != 0
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
    options.add_argument("packages", nargs="*", help="of router/, or folders in them; all, if none is named")
    options.add_argument("--sample", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--timeout-s", type=float, default=180.0, help="longest run of a package's tests")
    options.add_argument("--router", type=Path, help="router/ of another commit: only mutants that both have")
    options.add_argument("--again", type=Path, help="output of a former run: only its survivors")
    given = options.parse_args()
    if given.again:
        chosen = survivors(given.again.read_text())
    else:
        chosen = sample(given.packages or packages(ROOT / "router"), given.sample, given.seed, other=given.router)
    with TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(given.jobs):
            tree = Path(shutil.copytree(ROOT, Path(folder) / str(job), ignore=NOT_COPIED))
            trees.put(tree)
        for folder in sorted({folder for mutant in chosen for folder in folders_of(mutant.path)}):
            if _pytest(tree, [folder], given.timeout_s) != 0:
                print(f"{folder} fails without a mutant: mend it first")
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
