"""What is a pod asked for: what the client asks for, or the chat in place of a message."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from router.apis.openai import CHAT
from router.decision import Candidate
from router.request.context import RequestContext
from router.request.continuation.answer_words import AnswerWords
from router.request.continuation.later_pods import refused_by
from router.request.continuation.message_chat import chat_of, converts
from router.request.continuation.message_stream import MessageStream
from router.request.continuation.terms import Terms, terms_of
from router.request.inbound import Inbound
from router.types import Endpoint


class Asked(msgspec.Struct):
    """`message` writes the client's message from the stream of a chat."""

    endpoint: Endpoint
    inbound: Inbound
    body: bytes
    terms: Terms = Terms()
    message: MessageStream | None = None


def asked_of(context: RequestContext, candidate: Candidate, words: AnswerWords | None) -> tuple[Asked, str]:
    """What the pod of a candidate is asked for, and why its stream cannot be continued. A sampled message is asked for
    as the chat that vLLM makes of it, if that can be continued."""
    request, pod = context.request, candidate.pod
    asked = Asked(request.endpoint, context.inbound, request.body, _terms(context, request.endpoint, request.body))
    takes_ids = words is not None and asked.endpoint in pod.continues
    refusal = refused_by(context, candidate, asked.terms, takes_ids=takes_ids)
    if refusal != "sampled" or request.endpoint is not Endpoint.MESSAGES or words is None or not converts(pod):
        return asked, refusal
    if words.messages is None or not (body := chat_of(request.body, words.messages)):
        return asked, refusal
    terms = _terms(context, Endpoint.CHAT, body)
    if refusal := refused_by(context, candidate, terms, takes_ids=True):
        return asked, refusal
    inbound = replace(context.inbound, target=CHAT.path.encode())
    return Asked(Endpoint.CHAT, inbound, body, terms, MessageStream()), ""


def _terms(context: RequestContext, endpoint: Endpoint, body: bytes) -> Terms:
    prompt, policy = context.prompt, context.policy
    has_media, holds_calls = prompt is not None and prompt.has_media, policy is not None and policy.hold_tool_calls
    return terms_of(endpoint, body, has_media=has_media, holds_calls=holds_calls)
