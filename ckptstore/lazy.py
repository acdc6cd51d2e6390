"""Loading the modules that need torch only when they are used, with a clear word where it is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptstore.errors import UsageError


def load(module: str) -> Any:
    """The module of this name.

    Raises:
        UsageError: it needs torch, which is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install 'ckptstore[torch]'; verify, diff, push, pull and export work without"
        raise UsageError("saving and restoring live state", "torch is not installed", hint) from None
