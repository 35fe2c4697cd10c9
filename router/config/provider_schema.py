"""The frozen models of `providers[]` in `config/router.yaml`: hosted models that serve where no pod can."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from router.addresses import is_loopback, split_url, url_host
from router.admission.quotas import MAX_MONEY, Quota
from router.config.load import FilePath, HttpUrl, SecretPath, Strict
from router.engines.engine_catalog import HOSTED
from router.types import MAX_NAME_CHARACTERS, Pod, PodSpeed, PodTls

PER = 1_000_000
"""Prices are for as many tokens."""
_Amount = Annotated[float, Field(ge=0, le=MAX_MONEY, allow_inf_nan=False)]


def _encrypted(url: str) -> str:
    if split_url(url).scheme != "https" and not is_loopback(url_host(url)):
        raise ValueError("must begin with https://, because it gets a key and prompts (http on this machine only)")
    return url


class ProviderPrice(Strict):
    """Prices of a million tokens, in `admin.currency`."""

    prompt: _Amount
    cached: _Amount | None = None
    """The price of prompt tokens that the provider had cached. Default: as `prompt`."""
    output: _Amount

    def money(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """The price of a request. `cached_tokens`: of those of the prompt."""
        cached = self.prompt if self.cached is None else self.cached
        computed = (prompt_tokens - cached_tokens) * self.prompt
        return (computed + cached_tokens * cached + output_tokens * self.output) / PER


class Provider(Strict):
    """A hosted model that is a fallback of names. Its prompts leave this fleet, and cost money."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    """What `fallbacks` of a name call it; a label of metrics. Clients cannot ask for it."""
    url: Annotated[HttpUrl, AfterValidator(_encrypted)]
    """In front of the paths of its API, such as https://api.openai.com: without /v1."""
    api: Literal["openai", "anthropic"] = "openai"
    """Which requests it can serve: chats, completions, embeddings and responses of OpenAI's API, or messages of
    Anthropic's."""
    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    """Its name of the model."""
    key_file: SecretPath
    """A file with its API key, read again when it changes."""
    price: ProviderPrice
    budget_per_hour: Annotated[float, Field(gt=0, le=MAX_MONEY)]
    """The most money that it may cost in any hour, in `admin.currency`; with `index.redis`, of all routers together.
    Tenants have `money_per_hour` among their quotas."""
    max_output_tokens: PositiveInt = 16_384
    """The longest answer of the model. A request that sets no limit is counted with that until its end, so that no
    budget is exceeded."""
    timeout_s: PositiveFloat = 60.0
    """The longest wait for the begin of its response, which is its end for one that is no stream, and for each next
    piece. Then the next fallback serves, before the first byte."""
    ca_file: FilePath | None = None
    """The certificate of the authority that signed its own, in PEM. Default: the system's authorities."""

    @cached_property
    def pod(self) -> Pod:
        """The provider in the place of a pod."""
        speed, tls = PodSpeed(0.0, 0.0, 0.0), PodTls(ca_file=self.ca_file or "")
        return Pod(id=f"provider/{self.name}", url=self.url, engine=HOSTED, speed=speed, models=(self.name,), tls=tls)

    @cached_property
    def quotas(self) -> tuple[Quota, ...]:
        return (Quota(money_per_hour=self.budget_per_hour),)
