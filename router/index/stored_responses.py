"""Which pod stores which response of OpenAI's Responses API?

Engines keep responses in the memory of one process, where follow-ups, background polling and cancellation find them.
Ids are learnt as responses pass. They come from pods and clients: their length, characters and number are limited. The
first pod of an id keeps it, so that no client can divert the id of another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from router.apis.openai_responses import MAX_RESPONSE_ID_CHARACTERS
from router.types import PodId

MAX_RESPONSES = 65_536
"""Ids in memory, with pod and model: about 30 MB."""
MAX_LOST_PODS = 4096
TTL_S = 24 * 3600.0
"""An id that was not used for this long is forgotten."""

_ID = re.compile(f"[A-Za-z0-9_-]{{1,{MAX_RESPONSE_ID_CHARACTERS}}}")
_PATH = re.compile(f"/v1/responses/({_ID.pattern})(?:/[a-z_]+)?")


class StoredResponse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A response and the pod that stores it. `model`: its name as clients use it; `at_s`: when it was stored, by the
    monotonic clock of this machine; `owner`: the tenant that it belongs to, empty where none are configured."""

    id: str
    pod: PodId
    model: str
    at_s: float
    owner: str = ""


def is_response_id(text: str) -> bool:
    """Whether an id may be kept."""
    return _ID.fullmatch(text) is not None


def id_in_path(path: str) -> str:
    """The id of a stored response in the path of a request; empty for other paths."""
    found = _PATH.fullmatch(path)
    return found[1] if found else ""


class StoredResponses:
    """Pods by response id. Too many are evicted from an owner that has more than its share, the least recently used
    first. `share` is called for each id that is new here, unless another router sent it."""

    def __init__(self, share: Callable[[StoredResponse], None] = lambda _stored: None) -> None:
        self._share = share
        self._known: dict[str, StoredResponse] = {}
        self._used_s: dict[str, dict[str, float]] = {}
        """Ids and when they were used, by owner; the least recently used comes first."""
        self._lost_s: dict[PodId, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, stored: StoredResponse, now_s: float, *, remote: bool = False) -> None:
        """Keep an id, unless its pod is known. `remote`: another router learnt it."""
        if not is_response_id(stored.id) or (stored.id in self._known and not self.is_lost(stored.id)):
            return
        if stored.id in self._known:
            self._forget(stored.id)
        self._known[stored.id] = stored
        self._use(stored, now_s)
        if len(self._known) > MAX_RESPONSES:
            own = self._used_s[stored.owner]
            if len(own) * len(self._used_s) <= MAX_RESPONSES:
                own = max(self._used_s.values(), key=len)
            self._forget(next(iter(own)))
        if not remote:
            self._share(stored)

    def find(self, response_id: str, now_s: float) -> StoredResponse | None:
        """The response; None if it is unknown. Check `is_lost` as well."""
        stored = self._known.get(response_id)
        if stored is None:
            return None
        if now_s - self._used_s[stored.owner][response_id] > TTL_S:
            self._forget(response_id)
            return None
        self._use(stored, now_s)
        return stored

    def is_lost(self, response_id: str) -> bool:
        """Whether the pod of a known response has lost its memory since."""
        stored = self._known[response_id]
        return self._lost_s.get(stored.pod, stored.at_s) > stored.at_s

    def lose(self, pod: PodId, now_s: float) -> None:
        """A pod has left the fleet or was restarted. O(1)."""
        self._lost_s.pop(pod, None)
        self._lost_s[pod] = now_s
        if len(self._lost_s) > MAX_LOST_PODS:
            del self._lost_s[next(iter(self._lost_s))]

    def _use(self, stored: StoredResponse, now_s: float) -> None:
        used_s = self._used_s.setdefault(stored.owner, {})
        used_s.pop(stored.id, None)
        used_s[stored.id] = now_s

    def _forget(self, response_id: str) -> None:
        owner = self._known.pop(response_id).owner
        del self._used_s[owner][response_id]
        if not self._used_s[owner]:
            del self._used_s[owner]
