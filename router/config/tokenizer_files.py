"""Loads a tokenizer from its files.

`transformers` is the reference, because engines use it, but it takes a second to import and 200 MiB to load. If it
would use `tokenizer.json` unchanged, the library `tokenizers` reads that file instead; tests compare both.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import getproxies

from router.addresses import url_address
from router.config.load import read_text
from router.config.mistakes import nearest
from router.errors import ConfigError, shortened
from router.prompt.tokenizer import Tokenizer

HUB_TIMEOUT_S = 3.0
PACKAGE = "package:"
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that use `tokenizer.json` unchanged; others build their own tokenizer from its vocabulary."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WITHOUT_EFFECT = frozenset(
    {"tokenizer_class", "chat_template", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "legacy"}
    | {"model_max_length", "sp_model_kwargs", "model_input_names", "padding_side", "truncation_side", "backend"}
    | {"use_default_system_prompt", "name_or_path", "is_local", "local_files_only"}
)
"""Keys of `tokenizer_config.json` that do not change the tokens of a plain class."""
_CHANGING_FILES = ("config.json", "special_tokens_map.json", "added_tokens.json", "additional_chat_templates")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Location of a tokenizer: a directory with `tokenizer.json` (and `tokenizer_config.json`, `chat_template.jinja`),
    `package:NAME[/DIRECTORY]` inside an installed Python package, or a hub name. `chat_template` is the path of a Jinja
    file that replaces the tokenizer's own template."""

    path: str
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    backend: Any  # `tokenizers.Tokenizer`
    special_tokens: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None


def load_tokenizer(source: TokenizerSource, *, fast: bool = True) -> Tokenizer:
    """Load, fingerprint and, with `fast`, try to speed up a tokenizer. Takes a second or two. Raises `ConfigError` if
    there is none or it needs Python code of the model."""
    place = _place(source.path)
    try:
        loaded = _load_plain(Path(place)) or _load_with_transformers(place)
    except ConfigError:
        raise
    except Exception as error:  # both libraries raise anything for a broken file
        if not is_local(place) and not _reaches_hub():
            raise ConfigError(
                f"tokenizer {place}: no such folder, not in the cache, and the hub does not answer; name a folder,"
                " or check the network (`config check --offline` skips tokenizers of the hub)"
            ) from None
        raise ConfigError(f"tokenizer {place}: {shortened(str(error).partition(chr(10))[0], 300)}") from error
    template = read_text(Path(source.chat_template)) if source.chat_template else loaded.chat_template
    tokenizer = Tokenizer(loaded.backend, _fingerprint(place, template), loaded.special_tokens, template)
    if fast:
        tokenizer.adopt_fast()
    return tokenizer


def _place(path: str) -> str:
    """The directory that `path` names; a hub name stays as it is."""
    if path.startswith(PACKAGE):
        return _package_folder(path)
    if path.startswith(("/", "./", "../")) and not Path(path).is_dir():
        raise ConfigError(
            f"tokenizer {path}: no such folder; name a folder with tokenizer.json, package:NAME, a hub name or `engine`"
        )
    return path


def _package_folder(path: str) -> str:
    """The folder inside an installed package; in its name, `-` equals `_`."""
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    try:
        spec = find_spec(name.replace("-", "_"))
    except (ImportError, ValueError):  # a parent that is not installed, or no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        near = nearest(name.replace("-", "_"), packages_distributions())
        raise ConfigError(f"tokenizer {path}: the Python package {name} is not installed{near or '; install it'}")
    return str(Path(spec.submodule_search_locations[0], inside))


def read_processor(path: str) -> Mapping[str, Any]:
    """The `preprocessor_config.json` of a tokenizer's model; empty if it has none. Raises `ConfigError`."""
    place = _place(path)
    try:
        settings = json.loads(_file(place, "preprocessor_config.json") or b"{}")
    except ValueError as error:
        raise ConfigError(f"tokenizer {place}: preprocessor_config.json: {error}") from error
    return settings if isinstance(settings, dict) else {}


def is_local(path: str) -> bool:
    """Whether the tokenizer is loaded without a network."""
    return path.startswith((PACKAGE, "/", "./", "../")) or Path(path).is_dir()


def _load_plain(folder: Path) -> _Loaded | None:
    """Loaded with `tokenizers` alone; None if `transformers` might change anything in `tokenizer.json`."""
    if not (folder / "tokenizer.json").is_file() or any((folder / name).exists() for name in _CHANGING_FILES):
        return None
    own_template = folder / "chat_template.jinja"
    config = json.loads(_file(str(folder), "tokenizer_config.json") or b"{}")
    if config and config.get("tokenizer_class") not in _PLAIN_CLASSES:
        return None
    named = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    special_tokens = {name: str(one["content"] if isinstance(one, dict) else one) for name, one in named.items()}
    template = own_template.read_text("utf-8") if config and own_template.is_file() else config.get("chat_template")
    if config.keys() - _WITHOUT_EFFECT - set(_SPECIAL_TOKENS) or not isinstance(template, str | None):
        return None
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if backend.padding is not None or not known.issuperset(special_tokens.values()):
        return None
    return _Loaded(backend, special_tokens, template)


def _load_with_transformers(place: str) -> _Loaded:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch, which is not needed
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bare = Path(place, "tokenizer.json").is_file() and not Path(place, "tokenizer_config.json").is_file()
    reference: Any = (
        PreTrainedTokenizerFast(tokenizer_file=str(Path(place, "tokenizer.json")))
        if bare
        else AutoTokenizer.from_pretrained(place, local_files_only=not Path(place).is_dir() and not _reaches_hub())
    )
    if getattr(reference, "backend_tokenizer", None) is None:
        raise ConfigError(f"tokenizer {place}: no tokenizer.json; only fast tokenizers can be reproduced")
    return _Loaded(reference.backend_tokenizer, dict(reference.special_tokens_map), reference.chat_template)


def _reaches_hub() -> bool:
    """Whether the hub accepts connections. Its client would try for a minute. Behind a proxy, that is not known."""
    if getproxies():
        return True
    try:
        hub = url_address(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        socket.create_connection(hub, timeout=HUB_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _fingerprint(place: str, template: str | Mapping[str, str] | None) -> str:
    configuration = json.loads(_file(place, "tokenizer_config.json") or b"{}")
    configuration.pop("chat_template", None)
    digest = hashlib.sha256(_file(place, "tokenizer.json"))
    digest.update(json.dumps([configuration, template], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _file(place: str, name: str) -> bytes:
    """A tokenizer's file from its directory or, for a hub name, from the hub's local cache."""
    path: str | None = str(Path(place, name))
    if not Path(place).is_dir():
        from transformers.utils import cached_file

        path = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    return Path(path).read_bytes() if path and Path(path).is_file() else b""
