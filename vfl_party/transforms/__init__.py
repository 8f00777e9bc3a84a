"""What a party does to its tensors before others see them: one file a transform, found by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vfl_common.config.base import Section
from vfl_party.filter import Filter
from vfl_party.plugins import Room

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Transform(Generic[S]):
    """What a module exports as ``TRANSFORM``: its settings, and how a filter is made of them."""

    settings: type[S]
    make: Callable[[S], Filter]


ROOM = Room(sys.modules[__name__], "vfl.transforms", "TRANSFORM", "transform")


def load(kind: str, where: str) -> Transform[Any]:
    """Raises InputError that names ``where`` if there is no transform ``kind``."""
    found = ROOM.load(kind, where)
    assert isinstance(found, Transform)  # noqa: S101 - a defect of the plug-in
    return found
