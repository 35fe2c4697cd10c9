"""Which beginnings of chats are remembered, and for how long."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.pending import EMPTY_PREFIX, MAX_NEW_PLAIN, Boundary, CachedPrefix, PrefixCache, boundaries


def cache_of(max_bytes: int = 100_000) -> PrefixCache:
    return PrefixCache(max_bytes)


def raw(*contents: str) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode({"role": "user", "content": content})) for content in contents]


def of_chat(*contents: str, seed: int = 1) -> list[Boundary]:
    return boundaries(raw(*contents)[:-1], b"", seed, MAX_NEW_PLAIN)


def test_a_prefix_is_stored_when_it_is_seen_again() -> None:
    cache, prefix = cache_of(), CachedPrefix(roles=("user",))
    found = of_chat("a", "b")
    assert cache.find(found) is None
    assert cache.find(found) is EMPTY_PREFIX
    cache.store(found[0].digest, prefix)
    assert cache.find(found) is prefix
    assert cache.find(of_chat("a", "c")) is prefix
    assert cache.find(of_chat("c", "b")) is None


def test_the_longest_known_prefix_is_found() -> None:
    cache = cache_of()
    found = of_chat(*"abcd")
    assert [boundary.messages for boundary in found] == [3, 2, 1]
    prefixes = {boundary.messages: CachedPrefix(roles=("user",) * boundary.messages) for boundary in found}
    for boundary in found[1:]:
        cache.store(boundary.digest, prefixes[boundary.messages])
    assert cache.find(found) is prefixes[2]
    cache.store(found[0].digest, prefixes[3])
    assert cache.find(found) is prefixes[3]


def test_only_the_last_boundaries_are_looked_up() -> None:
    found = of_chat(*"abcdefgh")
    assert [boundary.messages for boundary in found] == [7, 6, 5, 4]
    assert len(found) == 1 + MAX_NEW_PLAIN
    assert of_chat("a") == []
    assert cache_of().find([]) is None


CHATS = st.lists(st.text(max_size=3), min_size=2, max_size=4)


@given(CHATS, CHATS)
def test_digests_are_equal_only_for_equal_messages(left: list[str], right: list[str]) -> None:
    def by_digest(chat: list[str]) -> dict[int, list[str]]:
        return {found.digest: chat[: found.messages] for found in of_chat(*chat)}

    ours, theirs = by_digest(left), by_digest(right)
    assert all(ours[digest] == theirs[digest] for digest in ours.keys() & theirs.keys())
    shared = [chat for chat in ours.values() if chat in theirs.values()]
    assert len(shared) == len(ours.keys() & theirs.keys())


def test_digests_depend_on_the_secret_seed() -> None:
    assert of_chat("a", "b") != of_chat("a", "b", seed=2)


def test_the_least_recently_used_prefixes_go_first() -> None:
    cache = cache_of(max_bytes=10_000)
    chats = [of_chat(str(i), "x") for i in range(5)]
    for found in chats:
        cache.store(found[0].digest, CachedPrefix(roles=("user",), tokens=b"t" * 2_000))
        assert cache.find(chats[0]) is not None
        assert cache.bytes <= 10_000
    assert len(cache) == 4
    assert cache.find(chats[-1]) is not None
    assert cache.find(chats[1]) is None


def test_bytes_are_those_of_what_is_held() -> None:
    """Also after replacing an entry by a larger and by a smaller one."""
    cache = cache_of()
    assert cache.bytes == 0
    found = of_chat("a", "b")
    cache.find(found)
    seen = cache.bytes
    sizes = []
    for tokens in (b"", b"t" * 1_000, b""):
        cache.store(found[0].digest, CachedPrefix(roles=("user",), tokens=tokens, hashes=tokens))
        cache.find(found)
        sizes.append(cache.bytes)
    assert sizes[0] == sizes[2] > seen > 0
    assert sizes[1] == sizes[0] + 2_000
    assert len(cache) == 1
