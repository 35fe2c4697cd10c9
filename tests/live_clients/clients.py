"""The clients: which program each one is, what it asks for, and how it runs against a base URL."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live_clients.recording_proxy import Exchange, recording
from tests.live_clients.scenario import AUDIO, EMBEDDINGS, GENERATION, MESSAGES, RESPONSES, Step

HOME = Path(os.environ.get("WARMROUTE_CLIENTS_HOME", Path.home() / ".cache" / "warmroute" / "clients"))
PROGRAMS = Path(__file__).with_name("programs")
DEADLINE_S = 900.0
OF_OPENAI: Mapping[str, Sequence[Step]] = {
    "generation": [*GENERATION, *RESPONSES],
    "embeddings": EMBEDDINGS,
    "audio": AUDIO,
}
OF_ANTHROPIC: Mapping[str, Sequence[Step]] = {"generation": MESSAGES}
OF_CURL = {**OF_OPENAI, "generation": [*GENERATION, *RESPONSES, *MESSAGES]}
STEPS: Mapping[str, Mapping[str, Sequence[Step]]] = {
    "openai_sdk.py": OF_OPENAI,
    "openai_sdk.mjs": OF_OPENAI,
    "anthropic_sdk.py": OF_ANTHROPIC,
    "anthropic_sdk.mjs": OF_ANTHROPIC,
    "langchain_sdk.py": {"generation": GENERATION[:1], "embeddings": EMBEDDINGS[:1]},
    "ai_sdk.mjs": {"generation": GENERATION[:1], "embeddings": EMBEDDINGS[:1], "audio": AUDIO[:1]},
    "curl.py": OF_CURL,
}
"""Per program, what it asks of each kind of pod. LangChain and the AI SDK have calls of their own; the first step names
the kind."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program received, and what its SDK returned to it: one value for each call."""

    exchanges: Sequence[Exchange]
    returned: Sequence[Any]

    @property
    def errors(self) -> Sequence[Any]:
        """Those that its SDK raised."""
        return [one for one in self.returned if isinstance(one, dict) and one.get("error")]


def command(program: str) -> list[str]:
    """Node finds packages next to a program, so it runs a copy there."""
    if program.endswith(".mjs"):
        return ["node", str(shutil.copy(PROGRAMS / program, HOME / "node"))]
    return [str(HOME / "python" / "bin" / "python"), str(PROGRAMS / program)]


async def run(program: str, kind: str, base_url: str) -> Ran:
    """Run a program to its end, behind a recording proxy."""
    async with asyncio.timeout(DEADLINE_S), recording(base_url) as proxy:
        process = await asyncio.create_subprocess_exec(
            *command(program),
            proxy.url,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(HOME)},
        )
        try:
            out, errors = await process.communicate(json.dumps(STEPS[program][kind]).encode())
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, errors.decode()[-4000:]
        return Ran(proxy.exchanges, [json.loads(line) for line in out.splitlines()])
