"""Learns how many tokens the answers of each model have.

The mean of the latest answers, of which a new model has made up ones of the prior's length:

    mean += (tokens - mean) / min(answers + PRIOR_ANSWERS, REMEMBERED_ANSWERS)

A client's limit says only that an answer is not longer: most clients set it far too high.
"""

from __future__ import annotations

from router.types import PRIOR_OUTPUT_TOKENS, Endpoint, InferenceRequest

PRIOR_ANSWERS = 10
REMEMBERED_ANSWERS = 200
MAX_ANSWER_TOKENS = 128 * 1024
"""A longer answer counts as this long: its length is what a pod reports."""
MAX_MODELS = 1024
"""Models and adapters; further ones have the prior."""
_NOT_GENERATING = frozenset({Endpoint.EMBEDDINGS, Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.COUNT_TOKENS})


class OutputLengths:
    """Mean lengths by model, or by adapter for requests to one."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[int, float]] = {}
        """Number of answers, and their mean with the prior."""

    def expected_tokens(self, request: InferenceRequest) -> int:
        """Expected length of the answer: the mean of its model, at most what the client allows."""
        if request.endpoint in _NOT_GENERATING:
            return 0
        _, mean = self._means.get(request.adapter or request.model, _PRIOR)
        return min(round(mean), request.max_output_tokens or MAX_ANSWER_TOKENS)

    def answered(self, model: str, tokens: int) -> None:
        """Learn from a finished answer. `model`: or the adapter."""
        if model in self._means or len(self._means) < MAX_MODELS:
            answers, mean = self._means.get(model, _PRIOR)
            weight = 1 / min(answers + 1 + PRIOR_ANSWERS, REMEMBERED_ANSWERS)
            self._means[model] = answers + 1, mean + weight * (min(tokens, MAX_ANSWER_TOKENS) - mean)


_PRIOR = 0, float(PRIOR_OUTPUT_TOKENS)
