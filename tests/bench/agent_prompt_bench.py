"""Cost of reading the next step of a long agent session, by API.

    python tests/bench/agent_prompt_bench.py agent_sessions.jsonl --tokenizer FOLDER

Sessions have the lengths and the growth of recorded ones, with tools, thinking, calls and results. Each of their last
steps is parsed, rendered, encoded and hashed as the router does it, once whole and once continued. Times are medians of
CPU in ms; bytecodes are those of one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.commands.mock_engine_command import TOKENIZER
from loadtest.simulator.agent_sessions import AgentRequest, AgentSession, read_agent_sessions
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.engines.engine_catalog import ENGINES
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation, PromptPrefix
from tests.kit import scenes

STEPS = 12
WARM_STEPS = 3
TOOLS = 16
TOKENS = (115_000, 140_000)
"""Sessions whose longest prompt is in this range."""
TEXT = (
    "the file path of this function returns value None if request body error test import class self def async await "
    "router pods { } ( ) [ ] => const let string number config README.md src/main.py 0x1f 42 return x + y; // ok"
)
WORDS = TEXT.split()
Body = dict[str, Any]


def longest_thread(session: AgentSession) -> list[AgentRequest]:
    """The requests that led to the session's longest prompt."""
    at: int | None = max(range(len(session.requests)), key=lambda i: session.requests[i].prompt_tokens)
    found = []
    while at is not None:
        found.append(session.requests[at])
        at = session.requests[at].base
    return found[::-1]


def long_sessions(path: Path) -> list[AgentSession]:
    """The recorded sessions with a long prompt and enough steps."""
    return [
        session
        for session in read_agent_sessions(path)
        if TOKENS[0] <= longest_thread(session)[-1].prompt_tokens <= TOKENS[1]
        and len(longest_thread(session)) > STEPS + WARM_STEPS
    ]


def words(random: Random, tokens: float) -> str:
    return " ".join(random.choices(WORDS, k=max(1, int(tokens / 1.35))))


def messages_body(session: AgentSession) -> Body:
    """The longest request of a session, as Claude Code sends it."""
    requests = longest_thread(session)
    random = Random(requests[-1].prompt_tokens)
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [
        {"name": f"tool_{i}", "description": words(random, session.tool_tokens / TOOLS - 60), "input_schema": schema}
        for i in range(TOOLS)
    ]
    first = requests[0].prompt_tokens - session.tool_tokens - session.system_tokens
    messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": words(random, first)}]}]
    for number, (before, after) in enumerate(pairwise(requests)):
        grown = max(after.prompt_tokens - before.prompt_tokens, 60)
        said = min(max(before.output_tokens, 30), grown - 20)
        call = {"type": "tool_use", "id": f"toolu_{number:024}", "name": f"tool_{number % TOOLS}"}
        messages += [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": words(random, said * 0.3), "signature": "s" * 300},
                    {"type": "text", "text": words(random, said * 0.3)},
                    {**call, "input": {"path": words(random, said * 0.4)}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call["id"],
                        "content": [{"type": "text", "text": words(random, grown - said)}],
                    }
                ],
            },
        ]
    system = [{"type": "text", "text": words(random, session.system_tokens)}]
    return {"model": "m", "max_tokens": 32_000, "system": system, "tools": tools, "messages": messages}


def chat_body(body: Body) -> Body:
    """The same as a chat."""
    messages: list[Body] = [{"role": "system", "content": body["system"][0]["text"]}]
    for kind, block in _blocks(body):
        if kind == "thinking":
            messages.append({"role": "assistant", "reasoning_content": block["thinking"]})
        elif kind == "said":
            messages[-1]["content"] = block["text"]
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            messages[-1]["tool_calls"] = [{"id": block["id"], "type": "function", "function": function}]
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": block["tool_use_id"]}
            messages.append({**result, "content": block["content"][0]["text"]})
        else:
            messages.append({"role": "user", "content": block["text"]})
    functions = [{"name": tool["name"], "description": tool["description"]} for tool in body["tools"]]
    tools = [
        {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
        for function, tool in zip(functions, body["tools"], strict=True)
    ]
    return {"model": "m", "messages": messages, "tools": tools}


def responses_body(body: Body) -> Body:
    """The same as items of the Responses API."""
    items: list[Body] = []
    for kind, block in _blocks(body):
        if kind == "thinking":
            thought = [{"type": "reasoning_text", "text": block["thinking"]}]
            items.append({"type": "reasoning", "id": "rs", "summary": [], "content": thought})
        elif kind == "tool_use":
            call = {"type": "function_call", "call_id": block["id"], "name": block["name"]}
            items.append({**call, "arguments": json.dumps(block["input"])})
        elif kind == "tool_result":
            output = {"type": "function_call_output", "call_id": block["tool_use_id"]}
            items.append({**output, "output": block["content"][0]["text"]})
        else:
            role, part = ("assistant", "output_text") if kind == "said" else ("user", "input_text")
            items.append({"type": "message", "role": role, "content": [{"type": part, "text": block["text"]}]})
    tools = [
        {"type": "function", "name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
        for t in body["tools"]
    ]
    return {"model": "m", "instructions": body["system"][0]["text"], "input": items, "tools": tools}


def _blocks(body: Body) -> Iterator[tuple[str, Body]]:
    for message in body["messages"]:
        for block in message["content"]:
            is_said = block["type"] == "text" and message["role"] == "assistant"
            yield "said" if is_said else block["type"], block


APIS: dict[str, tuple[Endpoint, str, int, Callable[[Body], Body]]] = {
    "messages": (Endpoint.MESSAGES, "messages", 2, lambda body: body),
    "chat": (Endpoint.CHAT, "messages", 2, chat_body),
    "responses": (Endpoint.RESPONSES, "input", 4, responses_body),
}
"""Endpoint, field of the messages, messages a step, how its body is made."""


def steps(api: str, session: AgentSession) -> list[bytes]:
    """The bodies of the last steps."""
    _, key, per_step, make = APIS[api]
    body = make(messages_body(session))
    ends = [len(body[key]) - per_step * back for back in reversed(range(STEPS))]
    return [msgspec.json.encode({**body, key: body[key][:end]}) for end in ends if end > 0]


def read(fingerprinter: Fingerprinter, endpoint: Endpoint, body: bytes) -> PromptPrefix:
    """What the router does with a body."""
    prompt = PARSERS[endpoint].prompt_fields(PARSERS[endpoint].parse(body))
    request = scenes.request(endpoint=endpoint, body=body, prompt=prompt)
    return fingerprinter.fingerprint(request, ENGINES["vllm"].conversions.get(endpoint))


class BytecodeCounter:
    """Counts the bytecodes of Python frames that run inside the block."""

    def __init__(self) -> None:
        self.bytecodes = 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.bytecodes += event == "opcode"
        return self._trace

    def __enter__(self) -> BytecodeCounter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def measure(fingerprinter: Fingerprinter, endpoint: Endpoint, bodies: list[bytes]) -> tuple[float, float, int, int]:
    """(median ms, longest ms, bytecodes of the last step, tokens)."""
    times_ms = []
    for body in bodies[:-1]:
        began_s = time.thread_time()
        read(fingerprinter, endpoint, body)
        times_ms.append((time.thread_time() - began_s) * 1000)
        time.sleep(0.005)
    with BytecodeCounter() as counter:
        found = read(fingerprinter, endpoint, bodies[-1])
    warm = times_ms[WARM_STEPS:]
    return statistics.median(warm), max(warm), counter.bytecodes, found.token_count


def main() -> None:
    """Print one table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("sessions", type=Path)
    arguments.add_argument("--tokenizer", default="")
    options = arguments.parse_args()
    tokenizer = load_tokenizer(TokenizerSource(options.tokenizer) if options.tokenizer else TOKENIZER)
    table = Table("API", "requests", "tokens", "KB", "whole ms", "continued ms", "longest ms", "bytecodes", "before")
    for session in long_sessions(options.sessions):
        for api, (endpoint, *_) in APIS.items():
            bodies = steps(api, session)
            template, generation = ChatTemplate(tokenizer), Generation(model="m")
            whole = measure(Fingerprinter(tokenizer, template, generation, incremental=False), endpoint, bodies)
            continued = measure(Fingerprinter(tokenizer, template, generation), endpoint, bodies)
            times = (f"{whole[0]:.2f}", f"{continued[0]:.2f}", f"{continued[1]:.2f}")
            sizes = (str(len(longest_thread(session))), f"{continued[3]:,}", f"{len(bodies[-1]) // 1024}")
            table.add_row(api, *sizes, *times, f"{continued[2]:,}", f"{whole[2]:,}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
