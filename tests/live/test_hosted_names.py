"""Clients of hosted models against two real vLLM pods, by the names that they have for them: SDKs and programs notice
nothing. The model has random weights, so that its answers have no sense and no calls of tools but forced ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from loadtest.commands.child_processes import RouterUrls
from tests.live.engines import HOME, start_vllm
from tests.live.live_fleet import AGENT_FLAGS, LiveFleet, live_fleet
from tests.live.test_coding_agents import claude_options, codex_options, need, run, workplace

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-qwen3"
NAMES = "names:\n- {name: claude-*, to: tiny}\n- {name: gpt-*, to: tiny}\n"
SHORT = '{"max_new_tokens": 48}'
"""Codex sets no limit."""
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
HI: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    folder = tmp_path_factory.mktemp("names")
    (folder / "names.yaml").write_text(NAMES)
    flags = (*AGENT_FLAGS, "--max-model-len", "32768", "--override-generation-config", SHORT)
    start, config = partial(start_vllm, model_dir=MODEL, extra_args=flags), {"names": str(folder / "names.yaml")}
    with live_fleet(
        "names", folder, MODEL, start, endpoints=["/v1/messages", "/v1/responses"], config=config
    ) as running:
        yield running


def urls_of(fleet: LiveFleet) -> RouterUrls:
    return RouterUrls(fleet.url, fleet.admin_url)


async def chat_text(client: openai.AsyncOpenAI, model: str) -> str:
    """Returns the text of a stream, which the unstreamed answer equals."""
    fields: dict[str, Any] = {"model": model, "messages": HI, "max_tokens": 12, "temperature": 0}
    whole = await client.chat.completions.create(**fields)
    parts = [one async for one in await client.chat.completions.create(**fields, stream=True)]
    text = "".join(one.choices[0].delta.content or "" for one in parts if one.choices)
    assert text == (whole.choices[0].message.content or "")
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    return text


async def test_the_sdk_of_openai_gets_by_a_name_what_it_gets_by_the_model(fleet: LiveFleet) -> None:
    """Chats, streams, a tool, responses; and the name is listed."""
    client = fleet.openai_sdk()
    assert await chat_text(client, "gpt-4o") == await chat_text(client, "tiny")
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    called = await client.chat.completions.create(model="gpt-4o", messages=HI, tools=[tool], tool_choice=choice)
    [call] = called.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    response = await client.responses.create(model="gpt-4o", input="Hello", max_output_tokens=12)
    assert response.status in ("completed", "incomplete") and response.output
    kinds = [event.type async for event in await client.responses.create(model="gpt-4o", input="Hello", stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


async def message_text(client: anthropic.AsyncAnthropic, model: str) -> str:
    fields: dict[str, Any] = {"model": model, "messages": HI, "max_tokens": 12, "extra_body": {"temperature": 0}}
    async with client.messages.stream(**fields) as events:
        streamed = await events.get_final_message()
    whole = await client.messages.create(**fields)
    texts = ["".join(getattr(block, "text", "") for block in one.content) for one in (streamed, whole)]
    assert texts[0] == texts[1]
    return texts[0]


async def test_the_sdk_of_anthropic_gets_by_a_name_what_it_gets_by_the_model(fleet: LiveFleet) -> None:
    """Messages, streams, a tool, a count of tokens."""
    client = fleet.anthropic_sdk()
    assert await message_text(client, "claude-sonnet-4-5") == await message_text(client, "tiny")
    tool: Any = {"name": "weather", "input_schema": WEATHER}
    choice: Any = {"type": "tool", "name": "weather"}
    called = await client.messages.create(
        model="claude-sonnet-4-5", messages=HI, tools=[tool], tool_choice=choice, max_tokens=48
    )
    assert [block.name for block in called.content if block.type == "tool_use"] == ["weather"]
    counts = [await client.messages.count_tokens(model=one, messages=HI) for one in ("claude-haiku-4-5", "tiny")]
    assert counts[0].input_tokens == counts[1].input_tokens > 0


async def test_claude_code_runs_by_the_names_of_its_own_models(fleet: LiveFleet, tmp_path: Path) -> None:
    need("claude")
    options, variables = claude_options(urls_of(fleet))
    first = await run(
        "claude", ["-p", "Hello", *options], workplace(tmp_path), **variables | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "48"}
    )
    (result,) = first.of_type("result")
    assert (result["subtype"], result["is_error"]) == ("success", False), result
    print(f"Claude Code: {result['usage']}")


async def test_codex_runs_by_the_name_of_a_hosted_model(fleet: LiveFleet, tmp_path: Path) -> None:
    need("codex")
    options, variables = codex_options(tmp_path, urls_of(fleet))
    ran = await run("codex", ["exec", *options, "Hello"], workplace(tmp_path), **variables)
    assert ran.of_type("turn.completed") and not ran.of_type("turn.failed")
    print(f"Codex: {ran.of_type('turn.completed')[0]['usage']}")
