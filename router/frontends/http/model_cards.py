"""Describes the served models for `/v1/models`."""

from __future__ import annotations

from typing import Any

from router.types import PodStatus


def model_cards(statuses: tuple[PodStatus, ...]) -> dict[str, dict[str, Any]]:
    """One OpenAI model card per model and adapter. `max_model_len` is the smallest of all pods that serve it."""
    cards: dict[str, dict[str, Any]] = {}
    for status in statuses:
        pod = status.pod
        for name in (*pod.models, *pod.adapters):
            card = cards.setdefault(
                name, {"id": name, "object": "model", "created": 0, "owned_by": "warmroute", "max_model_len": None}
            )
            if name in pod.adapters:
                card["parent"] = pod.base_model or None
            if pod.max_model_len_tokens is not None:
                card["max_model_len"] = min(card["max_model_len"] or pod.max_model_len_tokens, pod.max_model_len_tokens)
    return cards
