"""The endpoints that the router distinguishes."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    MESSAGES = "/v1/messages"
    """Anthropic's; read as the chat that the pods' engine makes of it."""
    COUNT_TOKENS = "/v1/messages/count_tokens"
    RESPONSES = "/v1/responses"
    """OpenAI's successor of chats; read as the chat that the pods' engine makes of it."""
    TOKENIZE = "/tokenize"
    """The tokens of a chat or a text; read as such."""
    DETOKENIZE = "/detokenize"
    """The text of tokens; forwarded unread."""
    REALTIME = "/v1/realtime"
    """A websocket, whose messages are not read."""
    OTHER = "other"
    """Any other endpoint: forwarded without a prefix."""


MAX_RESPONSE_ID_CHARACTERS = 128
"""Maximum length of the id of a stored response, which has ASCII letters, digits, `_` and `-`."""

TEXTS = frozenset({Endpoint.EMBEDDINGS, Endpoint.OTHER})
"""Endpoints of which only the number of tokens is read, where the body has texts to embed, score or rank."""

MAY_NAME_NO_MODEL = frozenset({Endpoint.OTHER, Endpoint.DETOKENIZE, Endpoint.REALTIME})
"""Endpoints whose body may be anything."""

CONVERTED = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS, Endpoint.RESPONSES})
"""Endpoints whose bodies every engine converts to a chat in its own way."""

READ_AS_CHATS = CONVERTED | {Endpoint.CHAT}
