"""Values that may be ``None``, where a test needs them."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Asserts that a value is not ``None`` and returns it."""
    assert value is not None
    return value
