"""The endpoints that the router distinguishes: a name for each record of an API."""

from __future__ import annotations

from enum import StrEnum

from router.apis import anthropic_messages, openai, openai_responses, vllm_tokens
from router.apis.api import OPENAI, Api, Conventions


class Endpoint(StrEnum):
    """An endpoint; its value is its path."""

    api: Api

    def __new__(cls, api: Api) -> Endpoint:
        endpoint = str.__new__(cls, api.path)
        endpoint._value_ = api.path
        endpoint.api = api
        return endpoint

    CHAT = openai.CHAT
    COMPLETIONS = openai.COMPLETIONS
    EMBEDDINGS = openai.EMBEDDINGS
    MESSAGES = anthropic_messages.MESSAGES
    """Anthropic's; read as the chat that the pods' engine makes of it."""
    COUNT_TOKENS = anthropic_messages.COUNT_TOKENS
    RESPONSES = openai_responses.RESPONSES
    """OpenAI's successor of chats; read as the chat that the pods' engine makes of it."""
    TOKENIZE = vllm_tokens.TOKENIZE
    """The tokens of a chat or a text; read as such."""
    DETOKENIZE = vllm_tokens.DETOKENIZE
    """The text of tokens; forwarded unread."""
    DECISIONS = vllm_tokens.DECISIONS
    SYSTEMONE = vllm_tokens.SYSTEMONE
    """With the decisions: questions about a text; forwarded unread."""
    GENERATE = vllm_tokens.GENERATE
    """SGLang's own; forwarded unread."""
    OTHER = openai.OTHER
    """Any other endpoint: forwarded without a prefix."""


_BY_PATH = {endpoint.value: endpoint for endpoint in Endpoint if endpoint is not Endpoint.OTHER}
CONVENTIONS = tuple(dict.fromkeys(endpoint.api.conventions for endpoint in Endpoint))
"""The conventions of all APIs, each once."""


def endpoint_of(path: str) -> Endpoint:
    return _BY_PATH.get(path, Endpoint.OTHER)


def conventions_of(path: str) -> Conventions:
    for one in CONVENTIONS:
        if one.prefix and (path == one.prefix or path.startswith(one.prefix + "/")):
            return one
    return OPENAI
