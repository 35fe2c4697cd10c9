"""Reads the fenced blocks of a markdown file, with what a comment before a block says about running it.

A comment applies to the next block and is invisible on the page:

    <!-- tour: skip, REASON -->           do not run it, or it is no configuration of the router
    <!-- tour: instead, COMMAND -->       run this command in its place
    <!-- tour: before, COMMAND -->        run this command first
    <!-- tour: replace OLD by NEW -->     change a part of it first
    <!-- tour: file PATH -->              write the block to this file
    <!-- tour: append PATH -->            add it to the end of this file
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

NOTE = re.compile(r"\s*<!-- tour: (skip|instead|before|replace|file|append)[, ]+(.+?) -->\s*")
FENCE = re.compile(r"(\s*)```(\w*)\s*")
SHELL, PYTHON, OUTPUT = "sh", "python", "text"
COMMANDS = (SHELL, PYTHON)
UNBOUNDED = re.compile(r"(?:^|[;&|]\s*)(?:until|while(?! (?:IFS=\S* )?read\b))\s", re.MULTILINE)
OWN_PACKAGE = re.compile(r"\bpip3? install\b.*?['\" ]\.(?:\[|['\" ]|$)")
FIGURE = re.compile(r"\d[\d.,]*")
SPACE = re.compile(r"[\s─]+")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `line` is that of its fence."""

    document: str
    line: int
    language: str
    text: str
    skip: str = ""
    instead: str = ""
    before: str = ""
    file: str = ""
    append: str = ""
    replaced: tuple[tuple[str, str], ...] = ()

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def runnable(self) -> str:
        """The text as it is run."""
        script = f"python - <<'END_OF_PROGRAM'\n{self.text}\nEND_OF_PROGRAM" if self.language == PYTHON else self.text
        text = self.instead or script
        for old, new in self.replaced:
            text = text.replace(old, new)
        return f"{self.before}\n{text}" if self.before else text


def blocks_of(path: Path, name: str) -> list[Block]:
    """All blocks of the file in order. Raises `ValueError` for a replacement of text that is not there."""
    found, notes, lines = [], Block(name, 0, "", ""), enumerate(path.read_text().splitlines(), 1)
    for number, line in lines:
        if note := NOTE.fullmatch(line):
            notes = _with_note(notes, note[1], note[2])
        elif fence := FENCE.fullmatch(line):
            text = "\n".join(_until_fence(lines))
            missing = [old for old, _ in notes.replaced if old not in text]
            if missing:
                raise ValueError(f"{name}:{number}: {missing[0]!r} is not in the block; change the comment before it")
            found.append(replace(notes, line=number, language=fence[2], text=text))
            notes = Block(name, 0, "", "")
    return found


def mistakes(block: Block) -> list[str]:
    """What would stop a reader, found without running the block: broken shell, a loop that may never end, and versions
    that nobody tested."""
    if block.language != SHELL or block.skip:
        return []
    parsed = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    found = [parsed.stderr.strip()] if parsed.returncode else []
    if UNBOUNDED.search(block.text):
        found.append("a loop that may never end; write `for _ in $(seq 60); do COMMAND && break; sleep 1; done`")
    for line in block.text.replace("\\\n", " ").splitlines():
        if OWN_PACKAGE.search(line) and "constraints.txt" not in line and "dist/" not in line:
            found.append(f"untested versions: `{line.strip()}` needs `-c constraints.txt`")
    return [f"{block.place}: {one}" for one in found]


def _with_note(block: Block, kind: str, text: str) -> Block:
    if kind == "replace":
        old, by, new = text.partition(" by ")
        if not by:
            raise ValueError(f"write `replace OLD by NEW` instead of `replace {text}`")
        return replace(block, replaced=(*block.replaced, (old, new)))
    return Block(**{**asdict(block), kind: text})


def _until_fence(lines: Iterable[tuple[int, str]]) -> Iterable[str]:
    for _, line in lines:
        if FENCE.fullmatch(line):
            return
        yield line


def differences(quoted: str, printed: str) -> list[str]:
    """Quoted lines that were not printed in this order. Figures and space may differ; `...` stands for any text in a
    line, and alone for any lines. Other lines may be printed in between only there."""
    rest = [_without_figures(line) for line in printed.splitlines() if line.strip()]
    missing, anywhere = [], True
    for line in quoted.splitlines():
        if line.strip() == "...":
            anywhere = True
        elif line.strip():
            pattern = re.compile(".*".join(map(re.escape, _without_figures(line).split("..."))))
            at = next((at for at, one in enumerate(rest) if pattern.fullmatch(one) and (anywhere or at == 0)), None)
            if at is None:
                missing.append(line)
            else:
                rest, anywhere = rest[at + 1 :], False
    return missing


def _without_figures(line: str) -> str:
    line = line.replace("...", "\0")
    return SPACE.sub(" ", FIGURE.sub("#", line)).strip().replace("\0", "...")
