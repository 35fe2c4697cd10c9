"""Records the responses of real engines as golden files.

Starts the engines one after the other, sends the requests of `cases.py` and a session that fills, shares, evicts and
resets a small KV cache, and writes the responses to `tests/parity/goldens/`. Run as `python -m
tests.live.record_goldens [chat|messages|harmony|sglang|events|pictures|llamacpp ...]`; takes about four minutes.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import zmq

from tests.live import harmony_goldens, sglang_goldens
from tests.live.cases import CHATS, COMPLETIONS, LONG, Body
from tests.live.engines import HOME, EngineProcess, start_llamacpp, start_vision, start_vllm
from tests.live.message_goldens import BODIES, RENDERERS, record, renderer
from tests.live.picture_bodies import picture_steps

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"
MODELS = HOME / "model"
PORT = 18131
KV_PORT = 15631
CACHE_BLOCKS = 60
CONTEXT_TOKENS = 1536
"""A session's context is smaller than the cache, so that one request always fits."""
QUIET_MS = 400
"""A request's events are complete after this time without one."""
BUSY_REQUESTS = 24
"""More than the 16 that run at once, so that some wait."""
BUSY_DEADLINE_S = 10.0
CHAT_ONLY = {"documents", "reasoning_effort", "tool_choice"}
"""Fields that /tokenize ignores: its tokens may then differ from the chat's."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

Line = dict[str, Any]


def main(parts: list[str]) -> None:
    """Record the given parts, or all."""
    GOLDENS.mkdir(parents=True, exist_ok=True)
    steps = {
        "chat": record_chats,
        "messages": record_apis,
        "harmony": record_harmony,
        "sglang": record_sglang,
        "events": record_events,
        "pictures": record_pictures,
        "llamacpp": record_llamacpp,
    }
    for part in parts or steps:
        began_s = time.monotonic()
        steps[part]()
        print(f"{part}: {time.monotonic() - began_s:.0f} s", flush=True)


# --- tokens ---


def record_chats() -> None:
    """Tokens of every case by both tiny models, and the full responses of one."""
    for model in ("tiny-llama", "tiny-qwen3"):
        engine = start_vllm(f"goldens-{model}", PORT, MODELS / model, kv_port=KV_PORT, extra_args=TOOLS)
        with engine, httpx.Client(base_url=engine.url, timeout=120) as client:
            chats = _token_cases(client, "/v1/chat/completions", CHATS)
            _save_json(f"vllm_chat_tokens_{model}.json", [case | _tokenized(client, case["body"]) for case in chats])
            tokens = _token_cases(client, "/v1/completions", COMPLETIONS)
            _save_json(f"vllm_completion_tokens_{model}.json", tokens)
            if model == "tiny-llama":
                _save_json("vllm_errors.json", list(_errors(client)))
                _save_text("vllm_stream_chat.txt", _stream(client))
                _save_text("vllm_metrics_busy.txt", _busy_metrics(client))


def record_apis() -> None:
    """Digests of the tokens of bodies of `/v1/messages` and `/v1/responses`, by each template."""
    for name in RENDERERS:
        with renderer(name, PORT) as engine, httpx.Client(base_url=engine.url, timeout=120) as client:
            for endpoint in BODIES:
                lines = record(client, name, endpoint)
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                _save_text(f"vllm_{endpoint.name.lower()}_{name}.jsonl", text)


def record_harmony() -> None:
    """The same for gpt-oss, and chats."""
    with harmony_goldens.renderer(PORT) as engine, httpx.Client(base_url=engine.url, timeout=120) as client:
        for endpoint, lines in harmony_goldens.recordings(client):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            _save_text(f"vllm_{endpoint.name.lower()}_gptoss.jsonl", text)


def record_sglang() -> None:
    """Tokens and events of SGLang's own Python."""
    for name, lines in (("tokens", sglang_goldens.token_lines()), ("events", sglang_goldens.event_lines())):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        _save_text(f"sglang_{name}.jsonl", text)


def _token_cases(client: httpx.Client, path: str, cases: Mapping[str, Body]) -> list[Line]:
    return [{"name": name, **_token_case(client, path, body)} for name, body in cases.items()]


def _token_case(client: httpx.Client, path: str, body: Body) -> Line:
    """{body, token_ids: a list per prompt} or {body, status, error}."""
    sent = {"model": "tiny", "max_tokens": 1, "temperature": 0, "return_token_ids": True, **body}
    answer = client.post(path, json=sent)
    if answer.status_code != 200:
        return {"body": sent, "status": answer.status_code, "error": answer.json()}
    result = answer.json()
    every = (
        [result["prompt_token_ids"]]
        if result.get("prompt_token_ids")
        else [choice["prompt_token_ids"] for choice in result["choices"]]
    )
    return {"body": sent, "token_ids": every}


def _tokenized(client: httpx.Client, body: Body) -> Line:
    """The tokens of /tokenize, if it has all fields of the chat."""
    if CHAT_ONLY & body.keys():
        return {}
    answer = client.post("/tokenize", json={key: body[key] for key in body.keys() - {"max_tokens", "temperature"}})
    result = answer.json()
    if answer.status_code != 200:
        return {"tokenize": {"status": answer.status_code, "error": result}}
    return {"tokenize": {"token_ids": result["tokens"]}}


def _busy_metrics(client: httpx.Client) -> str:
    """The metrics while the maximum number of requests runs and others wait."""
    body = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(BUSY_REQUESTS) as pool:
        sent = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(BUSY_REQUESTS)]
        deadline_s = time.monotonic() + BUSY_DEADLINE_S
        while not _waiting(text := client.get("/metrics").text):
            if time.monotonic() > deadline_s:
                raise TimeoutError("no request waited: the engine is too fast")
        for answer in sent:
            answer.result().raise_for_status()
    return text


def _waiting(metrics: str) -> bool:
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_waiting{")]
    return any(float(line.rpartition(" ")[2]) > 0 for line in lines)


def _errors(client: httpx.Client) -> Iterator[Line]:
    hello = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    bodies: dict[str, str] = {
        "unknown model": json.dumps(hello | {"model": "nobody"}),
        "prompt too long": json.dumps(hello | {"messages": [{"role": "user", "content": LONG * 5}]}),
        "malformed JSON": '{"model": "tiny", "messages": [',
        "stream_options without stream": json.dumps(hello | {"stream_options": {"include_usage": True}}),
        "tools is empty": json.dumps(hello | {"tools": []}),
        "max_tokens beyond the context": json.dumps(hello | {"max_tokens": 100_000}),
    }
    for name, body in bodies.items():
        answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        sent = body if len(body) < 1000 else f"{body[:200]} ... ({len(body)} characters)"
        yield {"name": name, "sent": sent, "status": answer.status_code, "body": answer.json()}


def _stream(client: httpx.Client) -> str:
    body = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Count to three."}],
    }
    return client.post("/v1/chat/completions", json=body).text


# --- events ---


def record_events() -> None:
    """One epoch of a small cache: requests, their event messages, and the replay of all of them."""
    small = ("--num-gpu-blocks-override", str(CACHE_BLOCKS), "--max-model-len", str(CONTEXT_TOKENS))
    engine = start_vllm("goldens-events", PORT, MODELS / "tiny-llama", kv_port=KV_PORT, extra_args=small)
    with engine, httpx.Client(base_url=engine.url, timeout=120) as client, zmq.Context() as context:
        lines = list(_session(_steps(client), context, engine))
        _save_text("vllm_metrics.txt", client.get("/metrics").text)
        models = client.get("/v1/models").json()
        models["data"][0]["root"] = MODELS.name + "/tiny-llama"  # no path of this machine
        _save_json("vllm_models.json", models)
        _save_json("vllm_kv_event_sources.json", client.get("/kv_event_sources").json())
    _save_text("vllm_events.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def record_pictures() -> None:
    """Requests with pictures, and their event messages."""
    engine = start_vision("goldens-pictures", PORT, kv_port=KV_PORT)
    with engine, httpx.Client(base_url=engine.url, timeout=120) as client, zmq.Context() as context:
        lines = [line for line in _session(picture_steps(client), context, engine) if line["kind"] != "replay"]
    _save_text("vllm_pictures.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _session(steps: Iterator[Line], context: zmq.Context[zmq.Socket[bytes]], engine: EngineProcess) -> Iterator[Line]:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(str(engine.kv_endpoint))
        time.sleep(1)  # a subscriber gets nothing before its connection is established
        for step in steps:
            yield step
            while subscriber.poll(QUIET_MS):
                yield {"kind": "event", "frames": _encoded(subscriber.recv_multipart())}
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(str(engine.replay_endpoint))
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        while dealer.poll(2000):
            yield {"kind": "replay", "frames": _encoded(dealer.recv_multipart())}


def _steps(client: httpx.Client) -> Iterator[Line]:
    """Two growing conversations, a repeated prompt, two tenants, prompts that evict all of that, and a reset; each part
    is repeated afterwards."""
    rules = {"role": "system", "content": LONG[:900]}
    first = [rules, {"role": "user", "content": "Describe the fox. " + LONG[900:1300]}]
    second = [rules, {"role": "user", "content": "Describe the dogs. " + LONG[1300:1700]}]
    for _ in range(3):
        for chat in (first, second):
            yield (said := _chat(client, chat, max_tokens=40))
            chat += [
                {"role": "assistant", "content": said["answer"]},
                {"role": "user", "content": f"Go on. {LONG[:200]}"},
            ]
    for salt in (None, None, "tenant a", "tenant a", "tenant b", None):
        yield _chat(client, second[:2], **({"cache_salt": salt} if salt else {}))
    exact = list(range(1000, 1096))
    for prompt in (exact, exact, exact[:64], [*exact, 7], exact[:33]):
        yield _ask(client, "/v1/completions", {"prompt": prompt})
    for start in range(0, 5000, 1000):
        yield _chat(client, [{"role": "user", "content": f"{start} {LONG[start : start + 1500]}"}])
    yield _chat(client, first)
    yield _chat(client, second)
    for _ in range(2):
        client.post("/reset_prefix_cache").raise_for_status()
        yield {"kind": "reset"}
        yield _chat(client, first[:2])
        yield _chat(client, first[:2], max_tokens=40)
        yield _chat(client, second[:4])


def _chat(client: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> Line:
    return _ask(client, "/v1/chat/completions", {"messages": list(messages), **fields})


def _ask(client: httpx.Client, path: str, fields: Body) -> Line:
    """A request as a line: body, tokens, cached tokens, and response."""
    body = {"model": "tiny", "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
    result = client.post(path, json=body).raise_for_status().json()
    choice = result["choices"][0]
    return {
        "kind": "request",
        "path": path,
        "body": body,
        "token_ids": result.get("prompt_token_ids") or choice["prompt_token_ids"],
        "cached_tokens": result["usage"]["prompt_tokens_details"]["cached_tokens"],
        "answer": choice["text"] if "text" in choice else choice["message"]["content"] or "",
    }


def _encoded(frames: list[bytes]) -> list[str]:
    return [base64.b64encode(frame).decode() for frame in frames]


# --- llama.cpp ---


def record_llamacpp() -> None:
    """The responses that the adapter reads, and two requests of which the second finds the first one's prompt."""
    chat = {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What does the fox say? " + LONG[:300]}],
    }
    text = {"content": "Caf\u00e9 <|im_start|> \u65e5\u672c", "add_special": True, "parse_special": True}
    engine = start_llamacpp("goldens-llamacpp", PORT, MODELS / "tiny-qwen3.gguf")
    with engine, httpx.Client(base_url=engine.url, timeout=60) as client:
        chats = [{"body": chat, "answer": client.post("/v1/chat/completions", json=chat).json()} for _ in range(2)]
        _save_json("llamacpp_chat.json", chats)
        _save_json("llamacpp_tokenize.json", {"body": text, "answer": client.post("/tokenize", json=text).json()})
        _save_json("llamacpp_models.json", client.get("/v1/models").json())
        props = client.get("/props").json()
        _save_json("llamacpp_props.json", props | {"model_path": Path(props["model_path"]).name})
        _save_text("llamacpp_metrics.txt", client.get("/metrics").text)


def _save_json(name: str, value: Any) -> None:
    _save_text(name, json.dumps(value, ensure_ascii=False) + "\n")


def _save_text(name: str, text: str) -> None:
    (GOLDENS / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
