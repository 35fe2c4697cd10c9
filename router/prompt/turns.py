"""How does a chat's prompt go on from what is known of its first messages?

`go_on` puts only the new messages into the template's form; when their tokens are known, `mark` leaves what the next
turn will go on from. This file never encodes text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from router.hashing import TOKEN_BYTES, hash_array, hash_rest
from router.prompt.conversation import plain_contents
from router.prompt.earlier import EarlierTurns
from router.prompt.template import ChatTemplate
from router.types import BlockHash, Earlier, InferenceRequest, Mark


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
    earlier: Earlier | None
    marked: Marked | None

    def hash_blocks(self, tokens: array[int], seed: BlockHash, block_size_tokens: int) -> array[int]:
        """Hashes of the full blocks in `tokens`, the whole prompt's."""
        known = hash_array()
        if self.earlier is not None and self.earlier.seed == seed:
            known.frombytes(self.earlier.hashes)
        return hash_rest(known, tokens, block_size_tokens, seed)


class ChatTurns:
    """Chats of one model. Threads: `mark` may run in any; all else is for the event loop's."""

    def __init__(self, model: str, template: ChatTemplate, known: EarlierTurns) -> None:
        self._model = model
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

    def mark(self, marked: Marked, tokens: array[int], hashes: array[int], seed: BlockHash, cut: Sequence[str]) -> None:
        """Remember the tokens of all that was known and of the pieces that were `cut` off the marked text, and the
        hashes of their full blocks."""
        if not tokens:
            return
        mark, rest = marked.mark, marked.text[sum(map(len, cut)) :]
        earlier = Earlier(
            digest=mark.digest,
            head=mark.head,
            model=self._model,
            roles=marked.roles,
            shape=marked.shape,
            tokens=tokens.tobytes(),
            seed=seed,
            hashes=hashes.tobytes(),
            rest=rest,
        )
        self._known.keep(mark, marked.body, marked.messages, earlier, marked.age)

    def forget(self) -> None:
        """What was known does not hold any more."""
        self._known.clear()


def earlier_token_count(earlier: Earlier | None) -> int:
    """How many tokens are known."""
    return len(earlier.tokens) // TOKEN_BYTES if earlier else 0
