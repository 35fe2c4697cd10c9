"""The router reads chats as the server of SGLang in Rust does, which runs without an engine."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from loadtest.commands.child_processes import free_port
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.prompt.apis.sglang_chat import SglangRustChat
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.types import Generation
from tests.live.engines import HOME
from tests.live.rust_bodies import random_chats
from tests.live.test_rust_front_end import read

pytestmark = [pytest.mark.live, pytest.mark.net]

TRIED = 500
TIMEOUT_S = 300
_ROLES = ("system", "user", "assistant", "tool")
MOST_WRONG = {"tiny-qwen3": 0.0, "tiny-llama": 0.08}
"""By model, the share of these chats of which it has other tokens: with integers above 64 bits in arguments, control
characters that are trimmed, odd variables."""


def _bodies() -> list[bytes]:
    """Odd chats, without what this server refuses."""
    made: list[bytes] = []
    for body in random_chats(TRIED):
        messages = [{**one, "role": one["role"] if one["role"] in _ROLES else "user"} for one in body["messages"]]
        for message in messages:
            message.pop("tools", None)
            calls = message.get("tool_calls") or ()
            functions = [{"arguments": "{}", **call["function"]} for call in calls]
            if calls:
                pairs = zip(calls, functions, strict=True)
                message["tool_calls"] = [{**call, "function": function} for call, function in pairs]
        made.append(json.dumps({"model": "tiny", **body, "messages": messages, "max_tokens": 1}).encode())
    return made


@pytest.mark.parametrize("name", MOST_WRONG)
def test_chats_have_the_tokens_of_the_server_in_rust(name: str) -> None:
    folder, bodies = HOME / "model" / name, _bodies()
    script = Path(__file__).with_name("sglang_rust.py")
    said = subprocess.run(
        [HOME / "sglang" / "bin" / "python", script, folder, str(free_port())],
        input=b"\n".join(bodies),
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    engine = [json.loads(line) for line in said.stdout.splitlines() if line[:1] in (b"[", b"n")]
    tokenizer = load_tokenizer(TokenizerSource(str(folder)), fast=True)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="tiny"))
    results: Counter[str] = Counter()
    for body, expected in zip(bodies, engine, strict=True):
        ours = read(fingerprinter, body, SglangRustChat)
        same = "unread" if ours is None else "equal" if ours == expected else "wrong"
        results["refused" if expected is None else same] += 1
    print(name, dict(results))
    assert results["equal"] > TRIED / 3
    assert results["wrong"] <= MOST_WRONG[name] * results["equal"]
