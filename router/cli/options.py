"""Lets a CLI command take its options as one dataclass instead of many parameters, and names configured defaults.

Typer reads a command's options from its signature. `with_options` builds the signature from the fields of a dataclass
and calls the command with an instance. Declare a field like a Typer parameter:
`port: Annotated[int, typer.Option(help="...")] = 8080`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import reduce
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

from router.config.schema import RouterConfig

OptionsT = TypeVar("OptionsT")


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
