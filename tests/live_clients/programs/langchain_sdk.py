"""LangChain over OpenAI's and Anthropic's APIs: its own calls, each whole and streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

TEXT = "Write the numbers from one to twenty in words."
READ = {"name": "read", "description": "Reads a page.", "parameters": {"type": "object", "properties": {}}}


def streamed(model: Any) -> list[Any]:
    return list(model.stream(TEXT))


def calls(url: str, kind: str) -> Iterator[Callable[[], Any]]:
    at: dict[str, Any] = {"model": "tiny", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    if kind == "embeddings":
        embeddings = OpenAIEmbeddings(**at, check_embedding_ctx_length=False)  # it would download a tokenizer
        yield partial(embeddings.embed_documents, [TEXT, "Another one."])
        yield partial(embeddings.embed_query, TEXT)
        return
    greedy = {"temperature": 0, "max_tokens": 12}
    chats = [ChatOpenAI(**at, **greedy, **more) for more in ({}, {"stream_usage": True}, {"stream_usage": False})]
    chats.append(ChatAnthropic(**(at | {"base_url": url}), **greedy))
    for model in (OpenAI(**at, **greedy), *chats, *(chat.bind_tools([READ]) for chat in chats)):
        yield partial(model.invoke, TEXT)
        yield partial(streamed, model)


def shown(returned: Any) -> Any:
    if isinstance(returned, list):
        return [shown(one) for one in returned]
    return returned.model_dump() if hasattr(returned, "model_dump") else returned


def main() -> None:
    for call in calls(sys.argv[1], json.load(sys.stdin)[0]["api"]):
        try:
            result = shown(call())
        except Exception as error:
            result = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(result, default=str))


main()
