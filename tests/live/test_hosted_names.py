"""Clients of hosted models against two real vLLM pods, by the names that they have for them: SDKs and programs notice
nothing. The model knows a few answers by heart.
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
from tests.live.answer_bodies import MODEL
from tests.live.answer_scripts import TOOLS
from tests.live.engines import start_vllm
from tests.live.live_fleet import AGENT_FLAGS, LiveFleet, live_fleet
from tests.live.test_coding_agents import claude_options, codex_options, need, run, workplace

# The SDK says that models of its maker will be gone; they are names here.
pytestmark = [
    *(pytest.mark.live, pytest.mark.net, pytest.mark.anyio),
    pytest.mark.filterwarnings("ignore:The model:DeprecationWarning"),
]

NAMES = "names:\n- {name: claude-*, to: tiny}\n- {name: gpt-*, to: tiny}\n"
TOKENS = 160
"""More than each answer has."""
SAID, CALLED = "The answer is 42", ["get_weather", "send_mail"]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
"""The SDK of Anthropic has no field for it any more."""
TALKS: list[Any] = [{"role": "user", "content": "script think"}]
CALLS: list[Any] = [{"role": "user", "content": "script tools"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    folder = tmp_path_factory.mktemp("names")
    (folder / "names.yaml").write_text(NAMES)
    start = partial(start_vllm, model_dir=MODEL, extra_args=(*AGENT_FLAGS, "--max-model-len", "32768"))
    apis, config = ["/v1/messages", "/v1/responses"], {"names": str(folder / "names.yaml")}
    with live_fleet("names", folder, MODEL, start, endpoints=apis, config=config) as running:
        yield running


def urls_of(fleet: LiveFleet) -> RouterUrls:
    return RouterUrls(fleet.url, fleet.admin_url)


async def chat_text(client: openai.AsyncOpenAI, model: str) -> str:
    """Returns the text of a stream, which the unstreamed answer equals."""
    fields: dict[str, Any] = {"model": model, "messages": TALKS, "max_tokens": TOKENS, "temperature": 0}
    whole = await client.chat.completions.create(**fields)
    parts = [one async for one in await client.chat.completions.create(**fields, stream=True)]
    text = "".join(one.choices[0].delta.content or "" for one in parts if one.choices)
    assert text == whole.choices[0].message.content
    return text


async def test_the_sdk_of_openai_gets_by_a_name_what_it_gets_by_the_model(fleet: LiveFleet) -> None:
    """Chats, streams, tools, responses."""
    async with fleet.openai_sdk() as client:
        text = await chat_text(client, "gpt-4o")
        assert SAID in text and text == await chat_text(client, "tiny")
        tools: list[Any] = TOOLS
        called = await client.chat.completions.create(model="gpt-4o", messages=CALLS, tools=tools, temperature=0)
        calls = called.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls if call.type == "function"] == CALLED
        asked: dict[str, Any] = {
            "model": "gpt-4o",
            "input": "script think",
            "temperature": 0,
            "max_output_tokens": TOKENS,
        }
        response = await client.responses.create(**asked)
        assert response.status == "completed" and SAID in response.output_text
        kinds = [event.type async for event in await client.responses.create(**asked, stream=True)]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


async def message_text(client: anthropic.AsyncAnthropic, model: str) -> str:
    """Returns the text of a stream, which the unstreamed answer equals."""
    fields: dict[str, Any] = {"model": model, "messages": TALKS, "max_tokens": TOKENS, **GREEDY}
    async with client.messages.stream(**fields) as events:
        streamed = await events.get_final_message()
    whole = await client.messages.create(**fields)
    texts = ["".join(getattr(block, "text", "") for block in one.content) for one in (streamed, whole)]
    assert texts[0] == texts[1]
    return texts[0]


async def test_the_sdk_of_anthropic_gets_by_a_name_what_it_gets_by_the_model(fleet: LiveFleet) -> None:
    """Messages, streams, tools, a count of tokens."""
    async with fleet.anthropic_sdk() as client:
        text = await message_text(client, "claude-sonnet-4-5")
        assert SAID in text and text == await message_text(client, "tiny")
        functions = [tool["function"] for tool in TOOLS]
        tools: list[Any] = [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in functions
        ]
        asked: dict[str, Any] = {"messages": CALLS, "tools": tools, "max_tokens": TOKENS, **GREEDY}
        called = await client.messages.create(model="claude-sonnet-4-5", **asked)
        assert [block.name for block in called.content if block.type == "tool_use"] == CALLED
        counts = [await client.messages.count_tokens(model=one, messages=TALKS) for one in ("claude-haiku-4-5", "tiny")]
        assert counts[0].input_tokens == counts[1].input_tokens > 0


async def test_claude_code_runs_by_the_names_of_its_own_models(fleet: LiveFleet, tmp_path: Path) -> None:
    need("claude")
    options, variables = claude_options(urls_of(fleet))
    variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = "2048"
    ran = await run("claude", ["-p", "script think", *options], workplace(tmp_path), **variables)
    (result,) = ran.of_type("result")
    assert (result["subtype"], result["is_error"]) == ("success", False), result
    print(f"Claude Code: {result['result']!r} {result['usage']}")


async def test_codex_runs_by_the_name_of_a_hosted_model(fleet: LiveFleet, tmp_path: Path) -> None:
    need("codex")
    options, variables = codex_options(tmp_path, urls_of(fleet))
    ran = await run("codex", ["exec", *options, "script think"], workplace(tmp_path), **variables)
    assert ran.of_type("turn.completed") and not ran.of_type("turn.failed")
    print(f"Codex: {ran.of_type('turn.completed')[0]['usage']}")
