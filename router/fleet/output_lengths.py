"""Learns how many tokens the answers of each model have, and those of each tenant.

The mean of the latest answers, of which a new model has made up ones of the prior's length:

    mean += (tokens - mean) / min(answers + PRIOR_ANSWERS, REMEMBERED_ANSWERS)

A client's limit says only that an answer is not longer: most clients set it far too high.
"""

from __future__ import annotations

from router.types import PRIOR_OUTPUT_TOKENS, InferenceRequest

PRIOR_ANSWERS = 10
REMEMBERED_ANSWERS = 200
MAX_ANSWER_TOKENS = 128 * 1024
"""A longer answer counts as this long: its length is what a pod reports."""
MAX_MEANS = 16_384
"""Maximum number of means, for models, adapters, and these by tenant; further ones have the prior."""


class OutputLengths:
    """Mean lengths by model, or by adapter for requests to one. `tenant`: "" for the mean of all."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], tuple[int, float]] = {}
        """Number of answers, and their mean with the prior, by tenant and model."""

    def expected_tokens(self, request: InferenceRequest, tenant: str = "") -> int:
        """Expected length of the answer: the mean of its model, at most what the client allows."""
        if not request.endpoint.api.generates:
            return 0
        _, mean = self._latest(tenant, request.adapter or request.model)
        return min(round(mean), request.max_output_tokens or MAX_ANSWER_TOKENS)

    def charged_tokens(self, request: InferenceRequest, tenant: str) -> int:
        """What a quota is charged before the answer: at least the prior's length for each choice, as far as the client
        allows it. Else short answers would make place for any number of long ones at once."""
        if not request.endpoint.api.generates:
            return 0
        tokens = max(round(self._latest(tenant, request.adapter or request.model)[1]), PRIOR_OUTPUT_TOKENS)
        return request.choices * min(tokens, request.max_output_tokens or MAX_ANSWER_TOKENS)

    def answered(self, model: str, tokens: int, tenant: str = "") -> None:
        """Learn from a finished answer. `model`: or the adapter."""
        if tenant:
            self._learn(tenant, model, tokens)
        self._learn("", model, tokens)

    def _learn(self, tenant: str, model: str, tokens: int) -> None:
        if (tenant, model) in self._means or len(self._means) < MAX_MEANS:
            answers, mean = self._latest(tenant, model)
            weight = 1 / min(answers + 1 + PRIOR_ANSWERS, REMEMBERED_ANSWERS)
            self._means[tenant, model] = answers + 1, mean + weight * (min(tokens, MAX_ANSWER_TOKENS) - mean)

    def _latest(self, tenant: str, model: str) -> tuple[int, float]:
        """A new tenant has the mean of all as prior."""
        return self._means.get((tenant, model)) or (0, self._means.get(("", model), _PRIOR)[1])


_PRIOR = 0, float(PRIOR_OUTPUT_TOKENS)
