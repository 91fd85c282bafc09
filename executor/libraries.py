"""Dispatch libraries that few machines have, imported when a plan asks for them."""

from importlib import import_module
from typing import Any

from moeplan.errors import InvalidInputError


def deep_ep(name: str) -> Any:
    """The class ``name`` of the package deep_ep. InvalidInputError where it is missing."""
    try:
        return getattr(import_module("deep_ep"), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"flex_backend: the package deep_ep has to provide {name}, got {type(error).__name__}: {error}",
            "build DeepEP for this machine (HybridEPBuffer is on its branch hybrid-ep), or set flex_backend = 'torch'",
        ) from error
