"""Which requests does a policy decide?

The conditions of a policy file, and the share of the matching requests that it takes. A share is cut by a hash of the
session: a conversation stays with one policy, and a replay finds the same policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, WithJsonSchema, model_validator

from router.types import InferenceRequest

HeaderPairs = Sequence[tuple[bytes, bytes]]
_PARTS = 10_000
"""Shares are exact to a hundredth of a percent."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_TEXT = {"type": "string"}
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
"""One name, or a list of alternatives."""


class TokenRange(BaseModel):
    """Prompt lengths, both ends included."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min: NonNegativeInt = 0
    """Minimum tokens."""
    max: NonNegativeInt | None = None
    """Maximum tokens; null for no limit."""

    @model_validator(mode="after")
    def _not_empty(self) -> TokenRange:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max ({self.max}) is below min ({self.min}): no prompt matches")
        return self

    def matches(self, tokens: int) -> bool:
        """Whether a prompt of that length is in the range."""
        return self.min <= tokens and (self.max is None or tokens <= self.max)


class Match(BaseModel):
    """Conditions on a request; all that are given must hold. `{}` matches every request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)

    model: Names | None = None
    """The name that pods serve; for an adapter, its base model."""
    adapter: Names | None = None
    """The LoRA adapter."""
    tenant: Names | None = None
    """The tenant of the key; without `tenants` in router.yaml, the value of `edge.tenant_header`."""
    workload_class: Annotated[Names | None, Field(alias="class")] = None
    """A class of `config/classes.yaml`."""
    headers: dict[str, Names] = Field(default_factory=dict)
    """Request headers by name, each with its accepted values."""
    prompt_tokens: TokenRange | None = None
    """Length of the prompt."""
    stream: bool | None = None
    """Whether the client requests a streamed answer."""

    @property
    def conditions(self) -> int:
        """Number of conditions: of two policies that match, the one with more conditions decides."""
        return sum(getattr(self, name) not in (None, {}) for name in type(self).model_fields)

    def matches(self, request: InferenceRequest, workload: str, prompt_tokens: int, headers: HeaderPairs) -> bool:
        """Whether all conditions hold. O(conditions + headers)."""
        return self.matches_without_headers(request, workload, prompt_tokens) and (
            not self.headers or self._matches_headers(headers)
        )

    def matches_without_headers(self, request: InferenceRequest, workload: str, prompt_tokens: int) -> bool:
        return (
            (self.stream is None or self.stream is request.stream)
            and (self.workload_class is None or workload in self.workload_class)
            and (self.model is None or request.model in self.model)
            and (self.adapter is None or request.adapter in self.adapter)
            and (self.tenant is None or request.tenant in self.tenant)
            and (self.prompt_tokens is None or self.prompt_tokens.matches(prompt_tokens))
        )

    def _matches_headers(self, headers: HeaderPairs) -> bool:
        given: dict[bytes, str] = {}
        for name, value in headers:  # the first of repeated headers counts, as elsewhere in the router
            given.setdefault(name.lower(), value.decode("latin-1"))
        return all(given.get(name.lower().encode()) in values for name, values in self.headers.items())


def takes_share(request: InferenceRequest, policy: str, percent: float) -> bool:
    """Whether the request is in the `percent` of requests that this policy takes: by a hash of the session id, or of
    the request id without one. Shares of different policies are independent."""
    if percent >= 100:
        return True
    seed = xxhash.xxh3_64_intdigest(policy.encode())
    key = (request.session or request.id).encode(errors="surrogatepass")
    return xxhash.xxh3_64_intdigest(key, seed) % _PARTS < percent / 100 * _PARTS
