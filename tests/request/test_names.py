"""Requests for a name: which model they become, how long a conversation stays there, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from router.admission.names import ModelName, NameRule, Names, NamesInUse, conversation_key, review
from router.admission.quotas import Hold, Quota, Quotas, Short
from router.admission.tenant import OPEN_TENANT, Tenant, allowed_names
from router.config.schema import Edge
from router.endpoints import Endpoint, endpoint_of
from router.errors import NoReadyPod, UnknownModel
from router.fleet.fleet import Fleet
from router.request.parse import PARSERS
from router.request.reading import RequestReader
from router.types import InferenceRequest
from tests.kit.scenes import make_pod

HALVES = {"m": 1.0, "n": 1.0}
BETA = NameRule({"lora": 1}, headers=((b"x-beta", b"1"),))
NAMES = Names(
    {
        "alias": ModelName("alias", {"m": 1}),
        "halves": ModelName("halves", HALVES),
        "drained": ModelName("drained", {"m": 0.0, "n": 1.0}),
        "beta": ModelName("beta", {"m": 1}, (BETA, NameRule({"n": 1}, frozenset({"acme"})))),
        "m": ModelName("m", HALVES),
        "down": ModelName("down", {"gone": 1}),
        "dark": ModelName("dark", {"gone": 1}, fallbacks=("lost",)),
    },
    (("claude-", ModelName("claude-*", {"n": 1})),),
    frozenset({"m", "n", "gone", "lost"}),
)
HI = [{"role": "user", "content": "hi"}]


def reader(names: NamesInUse | None = None) -> RequestReader:
    fleet = Fleet()
    fleet.sync([make_pod("a", models=("m",), adapters=("lora",)), make_pod("b", models=("n",))])
    return RequestReader(fleet, Edge(), 100, frozenset(), names or NamesInUse(NAMES))


def read(
    body: Mapping[str, Any],
    path: str = "/v1/chat/completions",
    tenant: Tenant = OPEN_TENANT,
    headers: Mapping[bytes, bytes] | None = None,
    **options: Any,
) -> InferenceRequest:
    found = json.dumps({"model": "halves", **body}).encode()
    return reader().read(endpoint_of(path), headers or {}, found, "r", tenant, **options)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HI, "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/rerank", {"query": "q", "documents": ["d"]}),
    ],
)
def test_pods_receive_the_model_in_place_of_the_name(path: str, fields: dict[str, Any]) -> None:
    """In the bodies of all APIs; other fields stay."""
    request = read({"model": "claude-opus", **fields}, path)
    assert (request.model, request.adapter, request.name) == ("n", "", "claude-*")
    sent = json.loads(request.body)
    assert {name: sent[name] for name in fields} == fields and sent["model"] == "n"


def test_an_adapter_may_be_a_target() -> None:
    request = read({"model": "beta", "messages": HI}, headers={b"x-beta": b"1"})
    assert (request.model, request.adapter, json.loads(request.body)["model"]) == ("m", "lora", "lora")


def test_a_model_that_is_no_name_stays_as_it_is() -> None:
    request = read({"model": "n", "messages": HI})
    assert (request.model, request.name) == ("n", "")


# --- a conversation stays with its model ---


def models_of(turns: list[dict[str, Any]], path: str, **options: Any) -> set[str]:
    return {read(turn, path, **options).model for turn in turns}


def test_a_chat_stays_with_its_model_and_chats_are_split() -> None:
    """Also when a client moves the marks of its cache, and writes a text as a part then."""
    seen = set[str]()
    for number in range(64):
        text = f"question {number}"
        first = {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}
        later = {"role": "user", "content": text}
        answer = {"role": "assistant", "content": "hm"}
        system = {"role": "system", "content": "Be brief."}
        turns: list[list[dict[str, Any]]] = [[first], [later, answer, first], [later, answer, later, answer, first]]
        chats = [{"messages": [system, *turn]} for turn in turns]
        anthropic = [{"system": f"turn {at}", "messages": turn, "max_tokens": 1} for at, turn in enumerate(turns)]
        items = [{"input": turn} for turn in turns]
        for bodies, path in ((chats, "/v1/chat/completions"), (anthropic, "/v1/messages"), (items, "/v1/responses")):
            found = models_of(bodies, path)
            assert len(found) == 1
            seen |= found
    assert seen == {"m", "n"}


def test_a_session_stays_with_its_model_whatever_it_sends() -> None:
    bodies = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(20)]
    assert len(models_of(bodies, "/v1/chat/completions", headers={b"x-session-id": b"s"})) == 1
    assert len(models_of([{**body, "session_id": "s"} for body in bodies], "/v1/chat/completions")) == 1


def test_a_stored_response_is_continued_by_its_own_model() -> None:
    for model in HALVES:
        request = read({"input": "and?", "previous_response_id": "resp_1"}, "/v1/responses", stored_model=model)
        assert (request.model, request.name) == (model, "halves")


def test_a_message_of_any_shape_has_a_conversation() -> None:
    """Also one that the pod will refuse."""
    contents: list[Any] = [
        None,
        5,
        [],
        ["x"],
        [[1]],
        [{"type": "image_url", "image_url": {"url": "x"}}],
        "\ud83d\ude00",
    ]
    for content in contents:
        assert read({"messages": [{"role": "user", "content": content}]}).name == "halves"
    assert read({"messages": [{"role": 5}]}).name == "halves"


def test_parts_that_nobody_writes_decide_nothing() -> None:
    """A message of a hundred thousand parts costs no more than its first ones."""
    parts = [{"type": "text", "text": f"part {number}"} for number in range(100)]
    keys = set[int]()
    for changed in (1, 90):
        other = [*parts[:changed], {"type": "text", "text": "other"}, *parts[changed + 1 :]]
        for one in (parts, other):
            body = json.dumps({"messages": [{"role": "user", "content": one}]}).encode()
            keys.add(conversation_key("", "", PARSERS[Endpoint.CHAT].parse(body), body))
    assert len(keys) == 2


# --- what a tenant may use ---


def tenant(*models: str, name: str = "acme") -> Tenant:
    return Tenant(name=name, models=allowed_names(models))


def test_a_tenant_needs_the_name_and_a_model_that_it_becomes() -> None:
    assert read({"model": "alias", "messages": HI}, tenant=tenant("alias", "m")).model == "m"
    for models in (("alias",), ("m",), ("alias", "n")):
        with pytest.raises(UnknownModel):
            read({"model": "alias", "messages": HI}, tenant=tenant(*models))


def test_the_message_about_an_unknown_model_lists_the_names_that_a_tenant_may_use() -> None:
    with pytest.raises(UnknownModel, match=r"does not exist\. Models: alias, m\. "):
        read({"model": "nobody", "messages": HI}, tenant=tenant("alias", "nobody", "m", "beta-x", "n-x"))


def test_weights_are_those_of_the_models_that_a_tenant_may_use() -> None:
    bodies = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(20)]
    assert models_of(bodies, "/v1/chat/completions", tenant=tenant("halves", "n")) == {"n"}


def test_a_model_without_weight_takes_no_conversation_of_a_tenant_that_may_use_no_other() -> None:
    with pytest.raises(UnknownModel):
        read({"model": "drained", "messages": HI}, tenant=tenant("drained", "m"))


def test_a_header_chooses_nothing_that_a_tenant_may_not_use() -> None:
    limited = Tenant(name="zeta", models=allowed_names(["beta", "m"]), adapters=allowed_names([]))
    with pytest.raises(UnknownModel):
        read({"model": "beta", "messages": HI}, tenant=limited, headers={b"x-beta": b"1"})


def test_a_stored_response_of_a_model_that_a_tenant_may_not_use_any_more_is_not_continued() -> None:
    body = {"input": "and?", "previous_response_id": "resp_1"}
    with pytest.raises(UnknownModel):
        read(body, "/v1/responses", tenant=tenant("halves", "m"), stored_model="n")


def test_a_rule_by_tenant_is_for_that_tenant() -> None:
    """Without keys, the one that the header names."""
    assert read({"model": "beta", "messages": HI}, tenant=Tenant(name="acme")).model == "n"
    assert read({"model": "beta", "messages": HI}, tenant=Tenant(name="zeta")).model == "m"
    assert read({"model": "beta", "messages": HI}, headers={b"x-tenant-id": b"acme"}).model == "n"


def test_a_name_whose_model_no_pod_serves_is_not_ready() -> None:
    with pytest.raises(NoReadyPod, match="gone"):
        read({"model": "down", "messages": HI})


def test_without_any_pod_the_target_is_what_is_missing() -> None:
    """Not its last fallback: the pods of the target are to start."""
    with pytest.raises(NoReadyPod) as caught:
        read({"model": "dark", "messages": HI})
    assert caught.value.model == "gone"


def test_a_quota_may_be_of_the_name_or_of_the_model() -> None:
    """And a request counts in both."""
    quotas, limits = Quotas(), (Quota(model="alias", requests_per_minute=1), Quota(model="m", requests_per_minute=2))
    for name, counts in (("alias", True), ("alias", False), ("", True), ("", False)):
        found = quotas.begin("acme", limits, "m", "", 1.0, name)
        assert isinstance(found, Hold if counts else Short)


def test_a_change_is_reviewed_with_the_latest_requests() -> None:
    """Those of models are among them: the change may name a model."""
    names = NamesInUse(NAMES)
    own = reader(names)
    for model in ("alias", "n"):
        own.read(Endpoint.CHAT, {}, json.dumps({"model": model, "messages": HI}).encode(), "r", OPEN_TENANT)
    assert [(one.asked, one.name, one.model) for one in names.recent] == [("alias", "alias", "m"), ("n", "", "n")]
    found = review(Names({"n": ModelName("n", {"m": 1})}), names.recent)
    assert found.startswith("2 of 2 requests would become another")


@pytest.mark.parametrize(("allowed", "reviewed"), [(("halves", "m", "n"), 1), (("halves", "n"), 0)])
def test_a_tenant_that_may_not_use_all_targets_is_not_reviewed(allowed: tuple[str, ...], reviewed: int) -> None:
    """Its weights are others: the review would find changes where there are none."""
    names = NamesInUse(NAMES)
    body = json.dumps({"model": "halves", "messages": HI}).encode()
    reader(names).read(Endpoint.CHAT, {}, body, "r", tenant(*allowed))
    assert len(names.recent) == reviewed


def test_no_name_of_any_length_is_kept() -> None:
    """Not for reviews, and not in the answer; those that do not exist are none of the requests that are reviewed."""
    names = NamesInUse(NAMES)
    for model in ("typo", "claude-" + "x" * 1018, "claude-" + "x" * 1_000_000):
        with pytest.raises(UnknownModel) as caught:
            body = json.dumps({"model": model, "messages": HI}).encode()
            reader(names).read(Endpoint.CHAT, {}, body, "r", OPEN_TENANT)
        assert len(str(caught.value)) < 1000
    assert not names.recent
