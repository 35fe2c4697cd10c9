"""The URL of a Redis: its parts, and what is wrong with it, without repeating it."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from router.config.index_schema import split_redis_url


def test_a_url_names_servers_user_and_database() -> None:
    """With default ports and escaped characters."""
    url = split_redis_url(SecretStr("redis://me:p%40ss@one,two:7000,[::1]/3"))
    assert url.nodes == (("one", 6379), ("two", 7000), ("::1", 6379))
    assert (url.username, url.password, url.database, url.is_tls) == ("me", "p@ss", 3, False)
    assert split_redis_url(SecretStr("rediss://one")).is_tls


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://one", "redis://"),
        ("me:sesame@one:6379", "redis://"),
        ("sesame", "redis://"),
        ("redis://", "host"),
        ("redis://:sesame@", "host"),
        ("redis://:sesame@one,", "host"),
        ("redis://me:sesame", "host"),
        ("redis://one:sesame", "host"),
        ("redis://one:99999", "host"),
        ("redis://one:6379?password=sesame", "host"),
        ("redis://:ses/ame@one", "number"),
        ("redis://one/sesame", "number"),
        ("redis://one/²", "number"),
        ("redis://[::1", "host"),
        ("redis://sesame]", "host"),
        ("redis://[sesame]:1", "host"),
        ("redis://:ses ame@one", "spaces"),
        ("redis://:sesame@one\t:1", "control"),
    ],
)
def test_an_invalid_url_is_refused_with_a_reason_and_without_its_text(url: str, said: str) -> None:
    """Any part may be the password."""
    with pytest.raises(ValueError, match=said) as caught:
        split_redis_url(SecretStr(url))
    assert "ame" not in str(caught.value).replace("user name", "")


def test_the_parts_are_printed_without_the_password() -> None:
    assert "sesame" not in repr(split_redis_url(SecretStr("redis://me:sesame@one")))
