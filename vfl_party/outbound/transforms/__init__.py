"""Transforms, which change a party's tensors before others see them: one file each, found by its
name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from vfl_common.config.base import Section
from vfl_party.base.plugins import Registry
from vfl_party.outbound.filter import Filter, Tensors

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Transform(Generic[S]):
    """The type that a module exports as ``TRANSFORM``: settings, and a function that makes a filter
    of them.

    ``tasks``: the kinds of task that it is defined for; empty: all. ``of_batch``: its noise depends
    on all rows of a batch, so a part of one would get too little. ``of_row``: what it promises is
    of a message that depends on one row.
    """

    settings: type[S]
    make: Callable[[S], Filter]
    tasks: frozenset[str] = frozenset()
    of_batch: bool = False
    of_row: bool = False


REGISTRY = Registry("vfl.transforms", "transform", __name__, "TRANSFORM")


def load(kind: str, where: str) -> Transform[Any]:
    """Returns the transform ``kind``; a class of Filter, or a function of one tensor, is one
    without settings. Raises InputError that names ``where`` if there is none.
    """
    export = REGISTRY.load(kind, where)
    if isinstance(export, type) and issubclass(export, Filter):
        made: Any = Transform(Section, lambda _settings: export())
    elif callable(export) and not isinstance(export, type):
        made = Transform(Section, lambda _settings: _OfEach(kind, export))
    else:
        made = export
    return REGISTRY.check_type(made, kind, where, Transform)


class _OfEach(Filter):
    """Changes each tensor by a function."""

    def __init__(self, text: str, change: Callable[[Tensor], Tensor]) -> None:
        self.text, self._change = text, change

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self._change(x.detach()) for name, x in tensors.items()}
