"""Does the time that the router takes for a prompt show whether another tenant has sent it?

    python -m loadtest.bench.tenant_timing                  # tenants of their own
    python -m loadtest.bench.tenant_timing --share          # the control: tenants of one group, where it must show

One tenant sends prompts until they are cached. Then another one sends these, and prompts that nobody has sent, in
random order. Prints the CPU time that reading them takes, and the p value of the sign test for pairs.
"""

from __future__ import annotations

import json
import random
import time
from statistics import NormalDist, median
from typing import Annotated

import msgspec
import typer

from loadtest.commands.mock_engine_command import mock_tokenizer
from router.admission.tenant import salt_of
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.types import Endpoint, Generation, InferenceRequest

WORDS = ("river", "table", "engine", "quiet", "seven", "paper", "green", "window", "music", "carry")
MESSAGES, WORDS_EACH = 5, 120
SENT_BEFORE = 3
BATCH = 25
"""Pairs that are sent before any of them is measured: a prompt that was computed just now runs faster for a moment,
also with a tokenizer and caches of its own, because the processor predicts its branches."""


def chat(source: random.Random) -> list[msgspec.Raw]:
    """A chat of random words, undecoded as the router's parser leaves it."""
    roles = ("user", "assistant") * MESSAGES
    texts = [" ".join(source.choices(WORDS, k=WORDS_EACH)) for _ in range(MESSAGES)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [msgspec.Raw(json.dumps(message).encode()) for message in messages]


def request(messages: list[msgspec.Raw], salt: str) -> InferenceRequest:
    """A chat request of a tenant with this salt."""
    body, prompt = b"".join(map(bytes, messages)), {"messages": messages}
    return InferenceRequest(id="r", endpoint=Endpoint.CHAT, model="m", body=body, salt=salt, prompt=prompt)


def main(
    pairs: Annotated[int, typer.Option(help="Prompts of each kind.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of prompts and their order.")] = 0,
    share: Annotated[bool, typer.Option("--share", help="Both tenants are of one group.")] = False,
) -> None:
    """Measure and print."""
    source = random.Random(seed)
    tokenizer = mock_tokenizer()
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="m"))
    first, second = (salt_of(name, "group" if share else "") for name in ("first", "second"))
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs // BATCH):
        prompts = [(chat(source), chat(source)) for _ in range(BATCH)]
        for sent, _ in prompts * SENT_BEFORE:
            fingerprinter.fingerprint(request(sent, first))
        order = [(number, kind) for number in range(BATCH) for kind in (0, 1)]
        times = {}
        for number, kind in source.sample(order, len(order)):
            asked = request([msgspec.Raw(bytearray(message)) for message in prompts[number][kind]], second)
            began = time.thread_time_ns()
            fingerprinter.fingerprint(asked)
            times[number, kind] = (time.thread_time_ns() - began) / 1000
        for number, kind in order:
            taken[kind].append(times[number, kind])
    known, unknown = taken
    difference = median(map(float.__sub__, known, unknown))
    print(f"{pairs} pairs, seed {seed}: median CPU {median(known):.1f} us where another tenant sent the prompt,")
    print(f"{median(unknown):.1f} us where nobody did; median difference {difference:.2f} us,")
    sooner = sum(map(float.__lt__, known, unknown))
    deviation = abs(sooner - pairs / 2) / (pairs / 4) ** 0.5
    print(f"sooner in {sooner} pairs, p = {2 * NormalDist().cdf(-deviation):.3g}")


if __name__ == "__main__":
    typer.run(main)
