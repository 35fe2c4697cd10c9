"""How does text become the tokens that the engine will see?

`transformers` is the reference, because engines use it. `fastokens` is a hundred times faster and stands in for it
only after it gave equal tokens on every sample; whoever compares the two on live traffic can end that for good.
This file never renders a chat and never reads a model's weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from router.errors import ConfigError
from router.prompt.backends import encode_fast, encode_reference, fast_equal_to
from router.prompt.samples import samples

PACKAGE = "package:"
_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer lies: a directory with `tokenizer.json` (and `tokenizer_config.json`,
    `chat_template.jinja`), `package:NAME[/DIRECTORY]` for one inside an installed Python package, or a hub name.
    `chat_template` is the path of a Jinja file that replaces the tokenizer's own template."""

    path: str
    chat_template: str | None = None


class Tokenizer:
    """One model's tokenizer. Any thread may encode, and any thread may end the trust in the fast backend.

    Texts must be encodable as UTF-8; `UnicodeError` or `TypeError` for half a surrogate pair."""

    fingerprint: str
    """Hex digest of what decides tokens: tokenizer.json, its configuration and the chat template."""
    backend: str
    """`fastokens` or `transformers`."""
    reason: str
    """Why this backend."""
    vocabulary_size: int
    """Highest token id plus one."""
    special_tokens: Mapping[str, Any]
    """What the template may name: `bos_token`, `eos_token`, ..."""
    chat_template: str | Mapping[str, str] | None
    """The template's text; several by name for the few models that ship `default` and `tool_use`."""
    added_tokens: tuple[Any, ...]
    """Every `tokenizers.AddedToken`, in order of id."""

    def __init__(self, reference: Any, fingerprint: str, chat_template: str | Mapping[str, str] | None) -> None:
        self._reference = reference.backend_tokenizer
        self._reference.no_truncation()
        self._reference.no_padding()
        self._fast: Any = None
        self.backend = "transformers"
        self.reason = "fastokens was not asked for"
        self.fingerprint = fingerprint
        self.chat_template = chat_template
        self.special_tokens = dict(reference.special_tokens_map)
        self.vocabulary_size = max(self._reference.get_vocab(with_added_tokens=True).values()) + 1
        decoder: dict[int, Any] = self._reference.get_added_tokens_decoder()
        self.added_tokens = tuple(decoder[token] for token in sorted(decoder))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        """Tokens of `text`, with those that the tokenizer puts around a text if asked for."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[array[int]]:
        """Tokens of each text. Leaves the fast backend for good if it fails where it must not."""
        fast = self._fast
        if fast is not None:
            try:
                return encode_fast(fast, texts, add_special_tokens)
            except (ValueError, RuntimeError) as error:
                if isinstance(error, UnicodeError):
                    raise
                self.distrust(f"fastokens failed: {error}")
        return encode_reference(self._reference, texts, add_special_tokens)

    def verify(self, text: str) -> bool:
        """Do both backends agree on this text? Slow: for a sample of the traffic, off the request path."""
        return self.encode(text) == encode_reference(self._reference, [text], False)[0]

    def distrust(self, reason: str) -> None:
        """From now on only `transformers` encodes."""
        self._fast, self.backend, self.reason = None, "transformers", reason

    @property
    def normalizes(self) -> bool:
        """Does text change before it is split (NFC, lower case, ...)?"""
        normalizer = self._reference.normalizer
        return normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []

    def adopt_fast(self) -> None:
        """Let `fastokens` encode if it reads this tokenizer and is equal on every sample; `reason` tells."""
        fast, reason = fast_equal_to(self._reference, samples([token.content for token in self.added_tokens]))
        if fast is not None:
            self._fast, self.backend = fast, "fastokens"
        self.reason = reason


def load_tokenizer(source: TokenizerSource, *, fast: bool = True) -> Tokenizer:
    """Load, fingerprint and, with `fast`, try to speed up a tokenizer. Takes a second or two.

    `ConfigError` where there is none, or none that `transformers` can run without Python code of the model's.
    """
    place = _place(source.path)
    reference = _load_reference(place)
    template = _read(source.chat_template) if source.chat_template else reference.chat_template
    tokenizer = Tokenizer(reference, _fingerprint(place, template), template)
    if fast:
        tokenizer.adopt_fast()
    return tokenizer


def _place(path: str) -> str:
    """The directory that `path` names; a hub name stays as it is."""
    if not path.startswith(PACKAGE):
        return path
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"tokenizer {path}: the Python package {name} is not installed")
    return str(Path(spec.submodule_search_locations[0], inside))


def _read(template: str) -> str:
    try:
        return Path(template).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"chat template {template}: {error}") from error


def _load_reference(place: str) -> Any:
    with _quiet_about_torch():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    bare = Path(place, "tokenizer.json").is_file() and not Path(place, "tokenizer_config.json").is_file()
    try:
        reference = (
            PreTrainedTokenizerFast(tokenizer_file=str(Path(place, "tokenizer.json")))
            if bare
            else AutoTokenizer.from_pretrained(place)
        )
    except Exception as error:  # transformers raises whatever the file made it trip over
        raise ConfigError(f"tokenizer {place}: {error}") from error
    if getattr(reference, "backend_tokenizer", None) is None:
        raise ConfigError(f"tokenizer {place}: no tokenizer.json; only fast tokenizers can be reproduced")
    return reference


@contextmanager
def _quiet_about_torch() -> Iterator[None]:
    """`transformers` advises at import to install torch, which a router does not need; errors stay loud."""
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = before


def _fingerprint(place: str, template: str | Mapping[str, str] | None) -> str:
    configuration = json.loads(_file(place, "tokenizer_config.json") or b"{}")
    configuration.pop("chat_template", None)
    digest = hashlib.sha256(_file(place, "tokenizer.json"))
    digest.update(json.dumps([configuration, template], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _file(place: str, name: str) -> bytes:
    """A tokenizer's file from its directory or, for a hub name, from the cache that loading it filled."""
    path: str | None = str(Path(place, name))
    if not Path(place).is_dir():
        from transformers.utils import cached_file

        path = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    return Path(path).read_bytes() if path and Path(path).is_file() else b""
