"""Runs the targets under a coverage-guided fuzzer.

`python -m tests.fuzz [TARGET ...] --seconds N`, or `make fuzz`. Each target runs in its own process, because libFuzzer
ends the process. Inputs that break a target are stored in `found/`, which the core suite reads.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CORPUS = Path(".fuzz")
"""The corpus of earlier runs, from which the next run continues. Git ignores it."""
MISSING = "atheris is not installed: pip install -e '.[fuzz]' (Linux on x86_64 or arm64, Python 3.11 to 3.14)"


def main() -> int:
    """The exit status: 0 where nothing was found."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("targets", nargs="*", metavar="TARGET", help="all of them by default")
    options.add_argument("--seconds", type=int, default=60, help="for each target")
    options.add_argument("--one", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if find_spec("atheris") is None:
        print(MISSING, file=sys.stderr)
        return 2
    if asked.one:
        fuzz(asked.one, asked.seconds)
    from tests.fuzz.targets import TARGETS

    if unknown := set(asked.targets) - TARGETS.keys():
        options.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(asked.seconds), "--one"]
    broken = [name for name in asked.targets or TARGETS if subprocess.run([*command, name], check=False).returncode]
    print(f"broken: {', '.join(broken)}" if broken else "nothing was found")
    return bool(broken)


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["router"]):
        from tests.fuzz.targets import FOUND, TARGETS
    _disable_logging()
    target, corpus, broke = TARGETS[name], CORPUS / name, FOUND / name
    corpus.mkdir(parents=True, exist_ok=True)
    broke.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = corpus.with_suffix(".dict")
    words.write_text("".join([_entry(word) for word in target.words]))
    print(f"--- {name}: {seconds} s", flush=True)
    flags = [
        f"-max_total_time={seconds}",
        f"-max_len={target.max_bytes}",
        f"-dict={words}",
        f"-artifact_prefix={broke}/",
    ]
    flags += ["-timeout=10", "-keep_seed=1", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(corpus), str(broke)], target.run)
    atheris.Fuzz()


def _disable_logging() -> None:
    """Disable logging: targets run a thousand times a second."""
    import structlog

    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _entry(word: bytes) -> str:
    """A line of a libFuzzer dictionary."""
    return '"' + "".join([rf"\x{byte:02x}" for byte in word]) + '"\n'


if __name__ == "__main__":
    sys.exit(main())
