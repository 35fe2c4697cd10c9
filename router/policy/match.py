"""Which requests does a policy decide?

Conditions of a policy file, all of which must hold, and the share of those requests that it takes. A share is cut by a
hash of the session, never by chance: a conversation stays with one policy, and a replay sees what the router saw. This
file never looks at pods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, WithJsonSchema, model_validator

from router.types import InferenceRequest

HeaderPairs = Iterable[tuple[bytes, bytes]]
_PARTS = 10_000
"""Into so many parts traffic is cut: a share is exact to a hundredth of a percent."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_TEXT = {"type": "string"}
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
"""One name, or a list of which any will do."""


class TokenRange(BaseModel):
    """Prompt lengths, both ends included."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    min: NonNegativeInt = 0
    """Fewest tokens."""
    max: NonNegativeInt | None = None
    """Most tokens; null for no limit."""

    @model_validator(mode="after")
    def _not_empty(self) -> TokenRange:
        if self.max is not None and self.max < self.min:
            raise ValueError("max is below min: nothing matches")
        return self

    def covers(self, tokens: int) -> bool:
        """Is it within?"""
        return self.min <= tokens and (self.max is None or tokens <= self.max)


class Match(BaseModel):
    """Conditions on a request; one that is not given always holds. `{}` is every request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)

    model: Names | None = None
    """As the pods name it: the base model of an adapter."""
    adapter: Names | None = None
    """The LoRA adapter."""
    tenant: Names | None = None
    """As `edge.tenant_header` says."""
    workload_class: Annotated[Names | None, Field(alias="class")] = None
    """A class of `config/classes.yaml`."""
    headers: dict[str, Names] = Field(default_factory=dict)
    """Request headers by name, and the values of which one is needed."""
    prompt_tokens: TokenRange | None = None
    """How long the prompt is."""
    stream: bool | None = None
    """Whether the answer is streamed."""

    @property
    def conditions(self) -> int:
        """How narrow it is: of two policies that match, the one with more conditions decides."""
        return sum(getattr(self, name) not in (None, {}) for name in type(self).model_fields)

    def covers(self, request: InferenceRequest, workload: str, prompt_tokens: int, headers: HeaderPairs) -> bool:
        """Do all conditions hold? O(conditions + headers)."""
        return self.covers_but_headers(request, workload, prompt_tokens) and (
            not self.headers or self._covers_headers(headers)
        )

    def covers_but_headers(self, request: InferenceRequest, workload: str, prompt_tokens: int) -> bool:
        """Do all the others hold?"""
        return (
            (self.stream is None or self.stream is request.stream)
            and (self.workload_class is None or workload in self.workload_class)
            and (self.model is None or request.model in self.model)
            and (self.adapter is None or request.adapter in self.adapter)
            and (self.tenant is None or request.tenant in self.tenant)
            and (self.prompt_tokens is None or self.prompt_tokens.covers(prompt_tokens))
        )

    def _covers_headers(self, headers: HeaderPairs) -> bool:
        given: dict[bytes, str] = {}
        for name, value in headers:  # of several with one name the first counts, as everywhere here
            given.setdefault(name.lower(), value.decode("latin-1"))
        return all(given.get(name.lower().encode()) in values for name, values in self.headers.items())


def takes_share(request: InferenceRequest, policy: str, percent: float) -> bool:
    """Is this request one of the `percent` that this policy takes? The same for all of a session; where there is no
    session, decided by the request's id. Shares of policies of different names are cut independently."""
    if percent >= 100:
        return True
    seed = xxhash.xxh3_64_intdigest(policy.encode())
    key = (request.session or request.id).encode(errors="surrogatepass")
    return xxhash.xxh3_64_intdigest(key, seed) % _PARTS < percent / 100 * _PARTS
