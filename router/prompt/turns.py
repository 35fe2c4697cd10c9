"""How does a chat's prompt go on from what is known of its first messages?

`go_on` puts only the new messages into the template's form; when their tokens are known, `mark` leaves what the next
turn will go on from. This file never encodes text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from router.prompt.conversation import plain_contents
from router.prompt.earlier import EarlierTurns
from router.prompt.template import ChatTemplate
from router.types import BlockHash, CachedPrefix, InferenceRequest, Mark, Piece


class Marked(msgspec.Struct, frozen=True, gc=False):
    """What of a chat is to be remembered: all of `body` in front of its last message."""

    mark: Mark
    body: bytes
    messages: int
    """So many of them are not known yet."""
    roles: tuple[str, ...]
    shape: int
    text: str
    """What these messages and the template say before the last content, from the last cut of what is known on."""
    age: int


class GoingOn(msgspec.Struct, frozen=True, gc=False):
    """The prompt's text behind what is known of it."""

    text: str
    earlier: CachedPrefix | None
    marked: Marked | None


class ChatTurns:
    """Chats of one model. Threads: `mark` may run in any; all else is for the event loop's."""

    def __init__(self, model: str, block_size_tokens: int, template: ChatTemplate, known: EarlierTurns) -> None:
        self._model = model
        self._block_size_tokens = block_size_tokens
        self._template = template
        self._known = known

    def go_on(self, request: InferenceRequest) -> GoingOn | None:
        """None where the template has to see all messages."""
        turns = request.turns
        plain = plain_contents(turns.messages) if turns else None
        if turns is None or plain is None:
            return None
        (roles, contents), earlier = plain, turns.earlier
        if earlier is not None and not self._known.holds(earlier):
            return None
        known = 0
        if earlier is not None:
            roles, known = earlier.roles + roles, len(earlier.roles)
        shape = self._template.shape(roles)
        if earlier is not None and (shape is None or shape.prefixes[known] != earlier.shape):
            self._known.drop(earlier)
            return None
        parts = shape.fill(contents, known) if shape else None
        if shape is None or parts is None:
            return None
        rest = earlier.rest if earlier else ""
        marked = None
        if turns.mark is not None:  # without the last content, and what the template says behind it
            text, new = rest + "".join(parts[:-2]), len(contents) - 1
            marked = Marked(turns.mark, request.body, new, roles[:-1], shape.prefixes[-2], text, self._known.age)
        return GoingOn(rest + "".join(parts), earlier, marked)

    def mark(
        self,
        marked: Marked,
        earlier: CachedPrefix | None,
        cut: Sequence[str],
        tokens: array[int],
        hashes: array[int],
        seed: BlockHash,
    ) -> None:
        """Remember the pieces that were `cut` off the marked text. Their `tokens` begin behind the last full block of
        what is known from `earlier`; `hashes` begin with those of all that."""
        block = self._block_size_tokens
        piece, full = earlier.piece if earlier else None, len(tokens) // block * block
        if full:
            piece = Piece(tokens[:full].tobytes(), piece, (piece.end_tokens if piece else 0) + full)
        if piece is None:
            return
        found = CachedPrefix(
            digest=marked.mark.digest,
            head=marked.mark.head,
            model=self._model,
            roles=marked.roles,
            shape=marked.shape,
            piece=piece,
            tail=tokens[full:].tobytes(),
            seed=seed,
            hashes=memoryview(hashes)[: piece.end_tokens // block].tobytes(),
            rest=marked.text[sum(map(len, cut)) :],
        )
        self._known.keep(marked.mark, marked.body, marked.messages, found, marked.age)

    def forget(self) -> None:
        """What was known does not hold any more."""
        self._known.clear()
