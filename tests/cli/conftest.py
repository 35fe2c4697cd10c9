"""Runs commands as a user types them."""

from tests.kit.command_line import typed

__all__ = ["typed"]
