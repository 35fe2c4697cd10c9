"""`helm test`: a chat of two turns through the router. The second must find the first in a cache."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

URL, MODEL, SECONDS, TENANTS = (*sys.argv[1:5], "")[:4]
KEY = os.environ.get("API_KEY", "").strip()
FOX = "The quick brown fox jumps over the lazy dog. " * 40


def call(path: str, body: Any = None) -> tuple[Any, Any]:
    data = json.dumps(body).encode() if body else None
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, json.load(answer)


def chat(model: str) -> int:
    """The prompt tokens of the second turn that were in a cache, as reported by the engine, else by the router."""
    turns = [{"role": "user", "content": f"Remember {time.time_ns()}. {FOX}"}]
    _, answer = call("/v1/chat/completions", {"model": model, "messages": turns, "max_tokens": 16})
    reply = answer["choices"][0]["message"]["content"] or "OK"
    time.sleep(1)  # until the engine has published its blocks
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "What did I say?"}]
    headers, answer = call("/v1/chat/completions", {"model": model, "messages": turns, "max_tokens": 16})
    usage, pod = answer["usage"], headers.get("x-warmroute-pod")
    found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    expected = int(headers.get("x-warmroute-cached-tokens") or 0)
    print(
        f"second turn on {pod}: {usage['prompt_tokens']} prompt tokens, {expected} expected in its cache, {found} found"
    )
    return found or expected


def refusal() -> str:
    """What is wrong, or nothing, where the test has no key of a tenant."""
    try:
        call("/v1/models")
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        print("a request without a key is refused; for a chat, name the Secret of a tenant's key in test.apiKeySecret")
        return ""
    return "a request without a key was answered, although tenants.existingSecret is set"


def attempt() -> str:
    """What is wrong, or nothing."""
    try:
        if TENANTS and not KEY:
            return refusal()
        if chat(MODEL or call("/v1/models")[1]["data"][0]["id"]):
            return ""
        return "no cache hit; does the engine cache prefixes? see trust and kv_events in `warmroute pods`"
    except (OSError, LookupError) as error:
        detail = error.read().decode(errors="replace")[:300] if hasattr(error, "read") else ""
        return f"{URL}: {error} {detail}"


end = time.monotonic() + float(SECONDS)
while problem := attempt():
    print(problem, file=sys.stderr)
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(2)
