"""What CLI commands share: options as one dataclass instead of many parameters, configured defaults, files to write.

Typer reads a command's options from its signature. `with_options` builds the signature from the fields of a dataclass
and calls the command with an instance. Declare a field like a Typer parameter:
`port: Annotated[int, typer.Option(help="...")] = 8080`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import reduce
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from router.config.schema import RouterConfig

OptionsT = TypeVar("OptionsT")


def flag(name: str, text: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=text, show_default="off")


PoliciesOption = Annotated[Path | None, typer.Option(help="Folder of policies.", show_default="the shipped policies")]


def with_options(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Decorate a command that takes one `options` instance.

    Defaults must be immutable: `default_factory` is not supported."""

    def decorate(command: Callable[[OptionsT], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(options(**values))

        hints = get_type_hints(options, include_extras=True)
        defaults = {
            field.name: Parameter.empty if field.default is MISSING else field.default
            for field in fields(options)  # type: ignore[arg-type]
        }
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in defaults.items()
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def configured(key: str) -> str:
    """The default of an option that overrides a key of router.yaml, for `show_default`."""
    value = reduce(getattr, key.split("."), RouterConfig())
    return f"{key} in --config, else {value}"


def writable(path: Path | None) -> Path | None:
    """Callback of an option that names a file to write. Refuses it before anything is computed."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path}: cannot be written; does the folder exist?")
    return path
