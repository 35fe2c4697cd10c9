"""An answer that is cut anywhere goes on exactly, from its token ids, on another engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest, RequestParser
from loadtest.mock_engine.mock_responses import DONE, StreamFrames
from loadtest.mock_engine.vocabulary import GeneratedText
from tests.lab.conftest import MakeConfig

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "write")]
SMILE = "say: Smile 😀, helix 🧬, family 👨‍👩‍👧‍👦, rare 𠜎𡃁 end."
THOUGHT = "think: Six times 🧬 seven.\n" + SMILE
CALLS = THOUGHT + '\ntool_call: read {"city": "Paris 😀", "days": 3}\nalso_call: write {"to": "ann"}'
Ask = Callable[..., GenerationRequest]


@pytest.fixture(scope="module")
def parsers(make_agent_config: MakeConfig) -> tuple[RequestParser, RequestParser]:
    """Those of two engines with the real tokenizer."""
    return RequestParser(make_agent_config()), RequestParser(make_agent_config())


def ask(parser: RequestParser, text: str, **fields: Any) -> GenerationRequest:
    """A streamed chat."""
    usual = {"messages": [{"role": "user", "content": text}], "stream": True, "return_token_ids": True}
    return parser.chat(msgspec.json.encode(usual | fields), "7")


def complete(parser: RequestParser, prompt: str | list[int], **fields: Any) -> GenerationRequest:
    """A streamed completion."""
    return parser.completion(msgspec.json.encode({"prompt": prompt, "stream": True} | fields), "7")


def frames(request: GenerationRequest) -> list[dict[str, Any]]:
    """The decoded frames of a stream."""
    made = StreamFrames(request, 100)
    stream = b"".join(made.tokens(0, len(request.output.tokens))) + made.closing(0)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in stream.removesuffix(DONE).split(b"\n\n")[:-1]]


def said(output: GeneratedText, first: int = 0) -> dict[str, str]:
    """What a client has read by kind."""
    texts: dict[str, str] = {}
    for kind, text in output.pieces[first:]:
        texts[kind] = texts.get(kind, "") + text
    return texts


def whole_characters(output: GeneratedText) -> Iterator[int]:
    """The numbers of tokens behind which no character is half written, and no call has begun."""
    kinds = [piece.kind for piece in output.pieces]
    end = kinds.index("name") - 3 if "name" in kinds else len(kinds)
    for kept in range(end + 1):
        if kept == 0 or output.pieces[kept - 1].text or output.pieces[kept - 1].kind == "markup":
            yield kept


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("hello", {}),
        ("hello", {"max_tokens": 30}),
        ("hello", {"chat_template_kwargs": {"enable_thinking": True}}),
        (SMILE, {}),
        (SMILE, {"max_tokens": 25}),
        (THOUGHT, {}),
        (THOUGHT, {"chat_template_kwargs": {"enable_thinking": True}}),
        (CALLS, {"tools": TOOLS}),
    ],
)
def test_a_chat_continues_from_every_whole_character(
    parsers: tuple[RequestParser, RequestParser], text: str, fields: dict[str, Any]
) -> None:
    """Tokens, texts by kind and the finish reason of both parts are those of the uncut answer."""
    first, second = parsers
    uncut = ask(first, text, **fields)
    cuts = list(whole_characters(uncut.output))
    assert len(cuts) > 10
    for kept in cuts:
        limit = fields.get("max_tokens")
        if kept == limit:
            continue  # the first engine has ended
        asked = fields if limit is None else fields | {"max_tokens": limit - kept}
        ids = [*uncut.prompt, *uncut.output.tokens[:kept]]
        rest = ask(second, text, **asked, kv_transfer_params={"prompt_token_ids": ids})
        assert rest.prompt.tolist() == ids
        if kept < len(uncut.output.tokens):
            assert rest.output.tokens == uncut.output.tokens[kept:]
            assert said(rest.output) == said(uncut.output, kept)
        assert rest.output.finish_reason == uncut.output.finish_reason


@pytest.mark.parametrize("prompt", ["hello there\n", SMILE + "\n"])
def test_a_completion_continues_from_every_whole_character(
    parsers: tuple[RequestParser, RequestParser], prompt: str
) -> None:
    first, second = parsers
    uncut = complete(first, prompt)
    for kept in whole_characters(uncut.output):
        rest = complete(second, [*uncut.prompt, *uncut.output.tokens[:kept]])
        if kept < len(uncut.output.tokens):
            assert rest.output == replace(
                uncut.output, tokens=uncut.output.tokens[kept:], pieces=uncut.output.pieces[kept:]
            )


def test_a_replay_gives_the_same_answer(parsers: tuple[RequestParser, RequestParser]) -> None:
    """Greedy, or sampled with a seed; without one it is another answer."""
    first, second = parsers
    for fields in ({}, {"temperature": 0}, {"temperature": 1.5, "seed": 7}):
        assert ask(first, "hello", **fields).output == ask(second, "hello", **fields).output
    sampled = [ask(one, "hello", temperature=1.5).output.tokens for one in parsers]
    assert sampled[0] != sampled[1]


def test_a_seed_starts_again_behind_a_seam(parsers: tuple[RequestParser, RequestParser]) -> None:
    """So ids and a seed give another answer than the uncut one."""
    first, second = parsers
    uncut = ask(first, "hello", seed=7, max_tokens=40)
    ids = [*uncut.prompt, *uncut.output.tokens[:10]]
    rest = ask(second, "hello", seed=7, max_tokens=30, kv_transfer_params={"prompt_token_ids": ids})
    assert rest.output.tokens != uncut.output.tokens[10:]


def test_another_beginning_gets_another_rest(parsers: tuple[RequestParser, RequestParser]) -> None:
    """A router that loses or repeats a token does not go unnoticed."""
    first, second = parsers
    uncut = ask(first, "hello", max_tokens=40)
    ids = [*uncut.prompt, *uncut.output.tokens[:9], uncut.output.tokens[8]]
    rest = ask(second, "hello", max_tokens=30, kv_transfer_params={"prompt_token_ids": ids})
    assert rest.output.tokens != uncut.output.tokens[10:]


def test_a_seam_inside_a_character_brings_the_prompt(parsers: tuple[RequestParser, RequestParser]) -> None:
    """The first character behind it comes with all of the prompt, as by vLLM."""
    first, second = parsers
    uncut = ask(first, SMILE)
    half = next(at for at, piece in enumerate(uncut.output.pieces) if not piece.text)
    ids = [*uncut.prompt, *uncut.output.tokens[: half + 1]]
    rest = ask(second, SMILE, kv_transfer_params={"prompt_token_ids": ids})
    assert rest.output.pieces[0].text.startswith("<｜begin▁of▁sentence｜><｜User｜>say: Smile 😀")


def test_a_seam_inside_a_call_brings_it_as_content(parsers: tuple[RequestParser, RequestParser]) -> None:
    """With its markup, and with `stop`."""
    first, second = parsers
    fields = {"tools": TOOLS[:1]}
    uncut = ask(first, 'tool_call: read {"city": "Paris"}', **fields)
    kinds = [piece.kind for piece in uncut.output.pieces]
    assert uncut.output.finish_reason == "tool_calls"
    ids = [*uncut.prompt, *uncut.output.tokens[: kinds.index("arguments") + 4]]
    rest = ask(second, 'tool_call: read {"city": "Paris"}', **fields, kv_transfer_params={"prompt_token_ids": ids})
    assert said(rest.output)["content"] == 'Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    assert rest.output.finish_reason == "stop"


def test_a_listed_call_without_reasoning_ends_the_reasoning_that_its_prompt_begins(
    parsers: tuple[RequestParser, RequestParser],
) -> None:
    """As agents ask that want the model to think."""
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = ask(parsers[0], 'tool_call: read {"city": "Paris"}', tools=TOOLS[:1], **thinks)
    assert (said(asked.output)["name"], asked.output.finish_reason) == ("read", "tool_calls")


def test_content_behind_reasoning_in_the_prompt_counts_as_reasoning(
    parsers: tuple[RequestParser, RequestParser],
) -> None:
    """As vLLM counts it; inside reasoning it counts what is left."""
    first, second = parsers
    uncut = ask(first, THOUGHT, stream_options={"include_usage": True})
    kinds = [piece.kind for piece in uncut.output.pieces]
    end = kinds.index("content")
    counts = {}
    for kept in (3, end):
        ids = [*uncut.prompt, *uncut.output.tokens[:kept]]
        rest = ask(
            second, THOUGHT, stream_options={"include_usage": True}, kv_transfer_params={"prompt_token_ids": ids}
        )
        usage = frames(rest)[-1]["usage"]
        assert usage["prompt_tokens"] == len(ids)
        counts[kept] = usage["completion_tokens_details"]["reasoning_tokens"]
    assert counts == {3: kinds.count("reasoning") - 2, end: kinds.count("content")}
    assert frames(uncut)[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == kinds.count("reasoning")


def test_given_ids_are_ignored_with_echo(parsers: tuple[RequestParser, RequestParser]) -> None:
    """The answer is then the one to the messages, from its start."""
    first, _ = parsers
    echo = ask(first, "hello", echo=True, kv_transfer_params={"prompt_token_ids": [5, 6]})
    assert echo.prompt == ask(first, "hello").prompt


def test_ids_out_of_the_vocabulary_are_refused(parsers: tuple[RequestParser, RequestParser]) -> None:
    first, _ = parsers
    with pytest.raises(EngineError, match="Token id 4000000 is out of vocabulary"):
        ask(first, "hello", kv_transfer_params={"prompt_token_ids": [5, 4_000_000]})
    with pytest.raises(EngineError, match="out of vocabulary"):
        complete(first, [4_000_000])


# --- the bytes of a stream ---


def test_a_stream_without_ids_is_one_with_ids_edited(parsers: tuple[RequestParser, RequestParser]) -> None:
    """Null for every list, and no frame that says nothing: that is all that ids change."""
    first, _ = parsers
    with_ids = ask(first, CALLS, tools=TOOLS, stream_options={"include_usage": True})
    edited = []
    for frame in frames(with_ids):
        for choice in frame["choices"]:
            if "token_ids" in choice:
                choice["token_ids"] = None
        if "prompt_token_ids" in frame:
            frame["prompt_token_ids"] = None
        if not frame["choices"] or frame["choices"][0]["delta"] or frame["choices"][0]["finish_reason"]:
            edited.append(frame)
    plain = frames(replace(with_ids, return_token_ids=False))

    def without_call_ids(stream: list[dict[str, Any]]) -> list[str]:
        for call in (c for f in stream for ch in f["choices"] for c in ch["delta"].get("tool_calls", ())):
            call.pop("id", None)
        return [json.dumps(frame) for frame in stream]

    assert without_call_ids(edited) == without_call_ids(plain)
    assert len(plain) < len(frames(with_ids))


def test_the_frames_of_a_chat_have_vllms_bytes(parsers: tuple[RequestParser, RequestParser]) -> None:
    """Keys in its order, and its nulls: role, text, half a character, the end."""
    first, _ = parsers
    request = replace(ask(first, "say: a 🧬"), model="tiny")
    made = StreamFrames(request, 100)
    got = [frame.decode() for frame in made.tokens(0, len(request.output.tokens))]
    head = (
        'data: {"id":"chatcmpl-7","object":"chat.completion.chunk","created":100,"model":"tiny","choices":[{"index":0,'
    )
    prompt, ids = json.dumps(request.prompt.tolist(), separators=(",", ":")), request.output.tokens
    rest = '"logprobs":null,"finish_reason":null'
    role = '"delta":{"role":"assistant","content":""}'
    assert got[0] == head + f'{role},{rest}}}],"prompt_token_ids":{prompt},"prompt_text":null}}\n\n'
    assert got[1] == head + f'"delta":{{"content":"a"}},{rest},"token_ids":[{ids[0]}]}}]}}\n\n'
    assert got[2] == head + f'"delta":{{}},{rest},"token_ids":[{ids[1]}]}}]}}\n\n'
    assert got[4] == head + f'"delta":{{"content":" 🧬"}},{rest},"token_ids":[{ids[3]}]}}]}}\n\n'
    end = f'"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":[{ids[4]}]}}]'
    assert got[5] == head + end + f',"system_fingerprint":"{request.engine}"}}\n\n'
    assert b'"token_ids":null' in StreamFrames(replace(request, return_token_ids=False), 100).tokens(0, 1)[1]


def test_the_frames_of_a_completion_have_vllms_bytes(parsers: tuple[RequestParser, RequestParser]) -> None:
    """A token without text has a frame as well; the prompt is in the first one."""
    first, _ = parsers
    request = complete(first, "say: a 🧬\n", return_token_ids=True)
    made = StreamFrames(request, 100).tokens(0, 4)
    head = b'data: {"id":"cmpl-7","object":"text_completion","created":100,"model":"tiny","choices":[{"index":0,'
    nulls = b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":'
    prompt = msgspec.json.encode(request.prompt.tolist())
    ids = request.output.tokens
    assert made[0] == head + b'"text":"a",' + nulls + prompt + b',"token_ids":[%d]}]}\n\n' % ids[0]
    assert made[1] == head + b'"text":"",' + nulls + b'null,"token_ids":[%d]}]}\n\n' % ids[1]
    assert made[3] == head + '"text":" 🧬",'.encode() + nulls + b'null,"token_ids":[%d]}]}\n\n' % ids[3]
    off = StreamFrames(replace(request, return_token_ids=False), 100).tokens(0, 1)
    assert off == [head + b'"text":"a",' + nulls + b'null,"token_ids":null}]}\n\n']


def test_a_frame_can_have_several_tokens(parsers: tuple[RequestParser, RequestParser]) -> None:
    """Their texts and ids together, reasoning and content apart."""
    first, _ = parsers
    one = ask(first, CALLS, tools=TOOLS)
    several = replace(one, stream_interval=5)
    deltas = [choice["delta"] for frame in frames(several) for choice in frame["choices"]]
    ids = [token for frame in frames(several) for token in frame["choices"][0].get("token_ids", ())]
    assert ids == list(one.output.tokens) and len(frames(several)) < len(frames(one)) / 4
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    assert (content, reasoning) == (said(one.output)["content"], said(one.output)["reasoning"])
    assert any("reasoning" in delta and "content" in delta for delta in deltas)
    arguments = {0: "", 1: ""}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        arguments[call["index"]] += call["function"].get("arguments", "")
    assert [json.loads(text) for text in arguments.values()] == [{"city": "Paris 😀", "days": 3}, {"to": "ann"}]


def test_usage_can_be_in_every_frame(parsers: tuple[RequestParser, RequestParser]) -> None:
    first, _ = parsers
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = [
        frame["usage"]["completion_tokens"]
        for frame in frames(ask(first, "hello", max_tokens=5, stream_options=options))
    ]
    assert counted == [0, 1, 2, 3, 4, 5, 5]


def test_hidden_reasoning_hides_ids(parsers: tuple[RequestParser, RequestParser]) -> None:
    """No frame has ids, also not those of the answer."""
    first, _ = parsers
    hidden = frames(ask(first, THOUGHT, include_reasoning=False))
    assert not any("reasoning" in frame["choices"][0]["delta"] for frame in hidden)
    assert not any(frame["choices"][0].get("token_ids") for frame in hidden)


# --- stop strings ---

STOPS = "say: one ST two STO three EN four END five STO six STOP seven"


def contents(request: GenerationRequest) -> list[str]:
    return [frame["choices"][0]["delta"].get("content", "") for frame in frames(request)[1:]]


def test_text_that_could_begin_a_stop_string_is_held_back(parsers: tuple[RequestParser, RequestParser]) -> None:
    """The longest string less one character, until the end of the output."""
    first, _ = parsers
    request = ask(first, STOPS, stop=["STOP", "ENDED"])
    assert contents(request)[:6] == ["", "on", "e ST", " tw", "o", " STO t"]
    assert "".join(contents(request)) == "one ST two STO three EN four END five STO six "
    last = frames(request)[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")
    unused = ask(first, STOPS, stop="zzzzzz")
    assert "".join(contents(unused)) == STOPS.removeprefix("say: ") and unused.output.stop_reason is None


def test_a_stop_string_in_the_output_holds_nothing_back(parsers: tuple[RequestParser, RequestParser]) -> None:
    first, _ = parsers
    request = ask(first, STOPS, stop=["STO three EN"], include_stop_str_in_output=True)
    assert contents(request)[:3] == ["one", " ST", " two"]
    assert "".join(contents(request)) == "one ST two STO three EN"
    assert request.output.stop_reason == "STO three EN"


def test_a_stop_string_across_the_seam_is_not_seen(parsers: tuple[RequestParser, RequestParser]) -> None:
    """By the second engine, which has its begin in the prompt."""
    first, second = parsers
    uncut = ask(first, STOPS, stop=["STO three"])
    kept = len(uncut.output.tokens) - 1
    ids = [*uncut.prompt, *uncut.output.tokens[:kept]]
    rest = ask(second, STOPS, stop=["STO three"], kv_transfer_params={"prompt_token_ids": ids})
    assert uncut.output.stop_reason == "STO three" and rest.output.stop_reason is None
