"""Anthropic's SDK for Python: runs the steps of standard input against a base URL, and prints what it returns."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic


def call(client: anthropic.Anthropic, api: str, body: dict[str, Any]) -> Any:
    if "temperature" in body:  # the SDK has no such parameter any more
        body["extra_body"] = {"temperature": body.pop("temperature")}
    if api == "count_tokens":
        return client.messages.count_tokens(**body).model_dump()
    if body.pop("stream", False):
        with client.messages.stream(**body) as stream:
            return [event.model_dump() for event in stream]
    return client.messages.create(**body).model_dump()


def main() -> None:
    with anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120) as client:
        for step in json.load(sys.stdin):
            try:
                result = call(client, step["api"], step["body"])
            except anthropic.APIError as error:
                result = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(result))


main()
