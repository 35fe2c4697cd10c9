"""Answers requests about tokens as the pods of the model would, where one of them was shown to have the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from router.engines.engine_catalog import ENGINES
from router.types import Endpoint, FleetSnapshot, InferenceRequest, Pod, PodState, PromptPrefix

TOKENS_PER_PIECE = 16_384
"""Encoded in one go: as many take half a millisecond."""


def token_answer(
    request: InferenceRequest, prompt: PromptPrefix | None, fleet: FleetSnapshot
) -> Iterator[bytes] | None:
    """The body of the answer in pieces; None if the prompt is not known exactly, or no ready pod is proven."""
    if prompt is None or prompt.has_media:
        return None
    proven = _proven(request, fleet)
    if request.endpoint is Endpoint.COUNT_TOKENS:
        count = prompt.token_count
        answer = b'{"input_tokens":%d,"context_management":{"original_input_tokens":%d}}' % (count, count)
        return iter([answer]) if any(True for _ in proven) else None
    count = len(prompt.tokens)
    known = (around for pod in proven if (around := ENGINES[pod.engine].around_tokens(count, pod)) is not None)
    around = next(known, None)
    return None if around is None else _listed(prompt.tokens, *around)


def _proven(request: InferenceRequest, fleet: FleetSnapshot) -> Iterator[Pod]:
    model = request.adapter or request.model
    for status in fleet.pods:
        if status.state is PodState.READY and status.pod.serves(model) and status.pod.reads_alike(request.endpoint):
            yield status.pod


def _listed(tokens: Sequence[int], head: bytes, tail: bytes) -> Iterator[bytes]:
    yield head
    for start in range(0, len(tokens), TOKENS_PER_PIECE):
        listed = msgspec.json.encode(list(tokens[start : start + TOKENS_PER_PIECE]))[1:-1]
        yield b"," + listed if start else listed
    yield tail
