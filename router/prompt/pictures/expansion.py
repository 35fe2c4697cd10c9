"""Puts the tokens of pictures in place of their placeholders, and hashes blocks with pictures."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from router.hashing import hash_rest, picture_token, token_array
from router.prompt.pictures.picture_reader import Picture
from router.types import BlockHash


def expanded(
    tokens: array[int], exact_tokens: int, placeholder: int, pictures: Sequence[Picture]
) -> tuple[array[int], int, list[tuple[int, Picture]]]:
    """(tokens, how many of them are exact, the pictures by where they begin). `tokens` have one placeholder for each
    picture; those behind the first `exact_tokens` are left as they are."""
    found, placed, start = token_array(), list[tuple[int, Picture]](), 0
    for picture in pictures:
        try:
            at = tokens.index(placeholder, start, exact_tokens)
        except ValueError:
            break
        found += tokens[start:at]
        placed.append((len(found), picture))
        found += token_array((placeholder,)) * picture.token_count if picture.tokens is None else picture.tokens
        start = at + 1
    more = len(found) - start
    found += tokens[start:]
    return found, exact_tokens + more, placed


def hash_pictures(
    text_hashes: array[int],
    tokens: array[int],
    placed: Sequence[tuple[int, Picture]],
    block_size_tokens: int,
    seed: BlockHash,
) -> array[int]:
    """Hashes of the full blocks in `tokens`, with pictures at these places. `text_hashes`: those of the tokens with one
    placeholder for each picture, which are equal in front of the first one."""
    known = min(placed[0][0] // block_size_tokens, len(text_hashes))
    hashed = tokens[known * block_size_tokens :]
    for at, picture in placed:
        inside = at - known * block_size_tokens
        hashed[inside] = picture_token(picture.identifier, hashed[inside])
    return hash_rest(text_hashes[:known], hashed, block_size_tokens, seed)
