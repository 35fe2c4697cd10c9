"""Reads the body of a request into an `InferenceRequest`.

Resolves its model and adapter, takes out the fields that may steer an engine, and gives its cache the salt of its
tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from router.admission.names import NameChoice, NamesInUse, chosen_target, conversation_key
from router.admission.tenant import Tenant
from router.apis.openai import ASKED_USAGE
from router.config.schema import Edge
from router.engines.engine_catalog import accepts_salt
from router.errors import DECODE_ERRORS, MalformedRequest, NoReadyPod, UnknownModel, not_json, shortened
from router.fleet.fleet import Fleet
from router.prompt.completion import number_of_prompts
from router.request.hosted import Hosted
from router.request.parse import (
    PARSERS,
    has_engine_fields,
    may_be_json_object,
    read_other,
    without_engine_fields,
)
from router.request.usage_filter import asking_options, shown_usage
from router.types import MAX_NAME_CHARACTERS, Endpoint, InferenceRequest, UsageShown

MAX_LISTED_CHARACTERS, MAX_LISTED_NAMES = 500, 100


class _Target(NamedTuple):
    """What becomes of a request: see `InferenceRequest`."""

    model: str
    name: str = ""
    fallbacks: tuple[str, ...] = ()
    fallback: str = ""


_NO_NAME = _Target("")


class RequestReader:
    """Reads requests of all APIs. `configured`: names of models that will be served, perhaps by pods that have not
    started yet. `names`: of the file of names, if there is one; `hosted`: providers among their fallbacks."""

    def __init__(
        self,
        fleet: Fleet,
        edge: Edge,
        max_messages: int,
        configured: frozenset[str],
        names: NamesInUse | None = None,
        hosted: Hosted | None = None,
    ) -> None:
        self._fleet = fleet
        self._names = names
        self.hosted = hosted or {}
        self._trusts_engine_fields = edge.trust_engine_fields
        self._max_messages = max_messages
        self._configured = configured
        self._session_headers = tuple(name.encode() for name in edge.session_headers)
        self._known_session_headers = frozenset(self._session_headers)
        self._tenant_header = edge.tenant_header.lower().encode()

    def read(
        self,
        endpoint: Endpoint,
        named: Mapping[bytes, bytes],
        body: bytes,
        request_id: str,
        tenant: Tenant,
        given_model: str = "",
        *,
        stored_model: str = "",
        sees_response: bool = True,
    ) -> InferenceRequest:
        """`given_model`: of a request whose body may name none; `stored_model`: of the stored response that it goes on
        with. `sees_response`: its stream may be asked for more than its client is to see. Raises `RouterError`."""
        if endpoint.api.may_name_no_model:
            parsed = None if given_model else read_other(body)
        else:
            parsed = PARSERS[endpoint].parse(body, max_messages=self._max_messages)
        session = self._session(named, parsed, tenant)
        owner = tenant.name or _name(named, self._tenant_header)
        model, target = (parsed and parsed.model) or given_model or self._only_model(tenant), _NO_NAME
        if self._names is not None:
            key = conversation_key(session, owner, parsed, body)
            target = self._chosen(model, stored_model, named, tenant, owner, key)
        usage, streams = UsageShown.ALL, bool(getattr(parsed, "stream", False))
        base, adapter = self._resolve(target.model or model, tenant, target, streams)
        if parsed and (target.name or not parsed.model):
            parsed.model = adapter or base
            body = with_field(body, "model", parsed.model)
        if not self._trusts_engine_fields and (has_engine_fields(parsed) if parsed else may_be_json_object(body)):
            body = without_engine_fields(body, endpoint.api.steering_fields)
        given_salt = getattr(parsed, "cache_salt", None)
        salt = tenant.salted(given_salt if isinstance(given_salt, str) else "")
        if tenant.salt and body and accepts_salt(self._fleet.snapshot, adapter or base, endpoint):
            if parsed and parsed.model and given_salt is None:
                body = appended(body, b'"%b":"%b"' % (_SALT.encode(), salt.encode()))
            elif parsed or may_be_json_object(body):
                body = with_field(body, _SALT, salt)
        if parsed and streams and endpoint in WITH_USAGE and sees_response:
            usage, body = _asked_usage(parsed.stream_options, body)
        prompts = number_of_prompts(parsed.prompt) if endpoint is Endpoint.COMPLETIONS and parsed else 1
        return InferenceRequest(
            id=request_id,
            endpoint=endpoint,
            model=base,
            adapter=adapter,
            body=body,
            stream=streams,
            usage=usage,
            tenant=owner,
            session=session,
            salt=salt,
            max_output_tokens=_max_output_tokens(parsed),
            name=target.name,
            fallbacks=target.fallbacks,
            fallback=target.fallback,
            choices=_choices(parsed) * prompts,
            prompts=prompts,
            prompt=PARSERS[endpoint].prompt_fields(parsed) if parsed else {},
        )

    def _session(self, named: Mapping[bytes, bytes], parsed: Any, tenant: Tenant) -> str:
        """The session id of the first header that has one, else of the body, among those of the tenant; empty without
        one. That of OpenAI's clients is the key by which they share caches."""
        found = getattr(parsed, "session_id", None) or getattr(parsed, "prompt_cache_key", None) or ""
        if not self._known_session_headers.isdisjoint(named):
            found = next((name for header in self._session_headers if (name := _name(named, header))), found)
        return f"{tenant.name}/{found}" if found and tenant.name else found

    def _chosen(
        self, asked: str, stored_model: str, named: Mapping[bytes, bytes], tenant: Tenant, owner: str, key: int
    ) -> _Target:
        """What a client asks for, in the conversation with this key: if no pod serves that, the first fallback that one
        serves, unless a provider is before it. Raises `UnknownModel` if the tenant may not use the name, or any of its
        models."""
        assert self._names is not None
        if len(asked) > MAX_NAME_CHARACTERS:
            raise self._unknown(asked, tenant)
        is_model = asked in self._configured or self._fleet.resolve(asked) is not None
        entry = self._names.current.find(asked, is_model=is_model)
        name, model, fallbacks, is_reviewed = "", stored_model or asked, tuple[str, ...](), is_model
        if entry is not None:
            targets = entry.weights_for(owner, named)
            usable = {target: weight for target, weight in targets.items() if weight and self._may_use(tenant, target)}
            name, model = entry.name, stored_model or chosen_target(usable, key)
            is_reviewed = len(usable) == sum(map(bool, targets.values()))
            if not model or not tenant.may_use(asked, ""):
                raise self._unknown(asked, tenant)
            if not stored_model:
                fallbacks = tuple(one for one in entry.fallbacks if one != model and self._may_use(tenant, one))
        if is_reviewed and not stored_model:
            self._names.recent.append(NameChoice(asked, name, model, owner, key))
        for number, one in enumerate(fallbacks if self._fleet.resolve(model) is None else (), 1):
            if one in self.hosted:
                break
            if self._fleet.resolve(one) is not None:
                return _Target(one, name, fallbacks[number:], NoReadyPod.code)
        return _Target(model, name, fallbacks)

    def _may_use(self, tenant: Tenant, model: str) -> bool:
        return tenant.may_use(*(self._fleet.resolve(model) or (model, "")))

    def _resolve(self, model: str, tenant: Tenant, target: _Target, stream: bool) -> tuple[str, str]:
        """Base model and adapter. One that the tenant may not use does not exist for it. `target`: what it became of,
        if that is another name."""
        found = self._fleet.resolve(model)
        if found is None and (target.name or model in self._configured) and tenant.may_use(model, ""):
            if any(one in self.hosted for one in target.fallbacks):
                return model, ""  # a provider may serve it, or says why not
            raise NoReadyPod(f"No pod that serves `{model}` has started yet; retry later.", model=model, stream=stream)
        if found is None and not any(status.pod.models for status in self._fleet.snapshot.pods):
            raise NoReadyPod("No pod has said yet which models it serves; retry later.")
        if found is None or not tenant.may_use(*found):
            raise self._unknown(model, tenant)
        return found

    def _unknown(self, model: str, tenant: Tenant) -> UnknownModel:
        usable = sorted({*self._usable(tenant), *self._usable_names(tenant)})
        known = f" Models: {shortened(', '.join(usable), MAX_LISTED_CHARACTERS)}." if usable else ""
        add = "To add one, start a pod that serves it under this name."
        name = shortened(model, MAX_LISTED_CHARACTERS)
        return UnknownModel(f"The model `{name}` does not exist.{known} {add}", param="model")

    def _usable_names(self, tenant: Tenant) -> list[str]:
        """Those of the first names that the tenant may use, with a model that they may become."""
        listed = islice(self._names.current.exact.values(), MAX_LISTED_NAMES) if self._names else ()
        may_use = partial(self._may_use, tenant)
        return [one.name for one in listed if tenant.may_use(one.name, "") and any(map(may_use, one.weights))]

    def _usable(self, tenant: Tenant) -> list[str]:
        """The models, without adapters, that the tenant may use."""
        served = {model for status in self._fleet.snapshot.pods for model in status.pod.models}
        return [model for model in served if tenant.may_use(model, "")]

    def _only_model(self, tenant: Tenant) -> str:
        """The model of a request that names none: the only one that the tenant may use; "" without any."""
        usable = self._usable(tenant)
        if len(usable) > 1:
            raise MalformedRequest("Set `model` in a JSON body or a form: several models are served.", param="model")
        return usable[0] if usable else ""


def _name(named: Mapping[bytes, bytes], header: bytes) -> str:
    """The value of a header; empty if it is absent. `MalformedRequest` if it is too long to keep."""
    value = named.get(header)
    if not value:
        return ""
    if len(value) > MAX_NAME_CHARACTERS:
        name = header.decode()
        raise MalformedRequest(
            f"The header `{name}` has {len(value)} characters, more than {MAX_NAME_CHARACTERS}.", param=name
        )
    return value.decode("latin-1")


def _choices(parsed: Any) -> int:
    """Answers that are computed for each prompt."""
    return max(getattr(parsed, "n", None) or 1, getattr(parsed, "best_of", None) or 1, 1)


def _max_output_tokens(parsed: Any) -> int | None:
    """The largest number of tokens that some engine would allow."""
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    limit = next((found for name in names if (found := getattr(parsed, name, None))), None)
    if limit and (preferred := getattr(parsed, "n_predict", None)):
        limit = max(limit, preferred) if preferred > 0 else None
    return limit if limit and limit > 0 else None


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SALT = "cache_salt"


WITH_USAGE = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
"""Endpoints whose streams have usage only where it is asked for."""


def _asked_usage(options: msgspec.Raw | msgspec.UnsetType, body: bytes) -> tuple[UsageShown, bytes]:
    """What the client of a stream sees of its usage, and the body that asks for it in any case."""
    usage = shown_usage(options)
    if usage is not UsageShown.NONE:
        return usage, body
    if isinstance(options, msgspec.UnsetType):
        return usage, appended(body, ASKED_USAGE)
    return usage, with_field(body, "stream_options", asking_options(options))


def appended(body: bytes, field: bytes) -> bytes:
    """The body, which is a JSON object with a field, with this one at its end: of a duplicate key, every engine takes
    the last, or refuses it. The body is copied and not decoded."""
    end = memoryview(body)[: body.rindex(b"}")]
    return b"".join((end, b",", field, b"}"))


def for_model(
    request: InferenceRequest, model: tuple[str, str], fallbacks: tuple[str, ...], why: str, *, salts: bool
) -> InferenceRequest:
    """The request for a name by another of its models: base model and adapter. `salts`: its pods take a salt."""
    base, adapter = model
    body = with_field(request.body, "model", adapter or base)
    if request.salt and salts:
        body = with_field(body, _SALT, request.salt)
    return replace(request, model=base, adapter=adapter, body=body, fallbacks=fallbacks, fallback=why)


def with_field(body: bytes, name: str, value: Any) -> bytes:
    """The body with this value in place of its own. Raises `MalformedRequest` unless it is a JSON object."""
    try:
        fields = _OBJECT.decode(body)
    except DECODE_ERRORS as error:
        raise not_json(error, body) from error
    fields.pop(name, None)
    return msgspec.json.encode({**fields, name: value})
