"""Transforms, which change a party's tensors before other parties get them. Each is a module, found
by name.
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
    """The object that a module exports as ``TRANSFORM``: the model of its settings, and a function
    that makes a filter from them.

    ``tasks``: the kinds of task that the transform supports; empty: all. ``of_batch``: whether the
    noise depends on all rows of a batch, so that a part of a batch would get too little.
    ``of_row``: whether the privacy guarantee is for one row of a message.
    """

    settings: type[S]
    make: Callable[[S], Filter]
    tasks: frozenset[str] = frozenset()
    of_batch: bool = False
    of_row: bool = False


REGISTRY = Registry("vfl.transforms", "transform", __name__, "TRANSFORM")


def load(kind: str, where: str) -> Transform[Any]:
    """Returns the transform ``kind``. An exported subclass of Filter, or a function of one tensor,
    becomes a transform without settings. Raises InputError that names ``where`` if the transform is
    unknown.
    """
    export = REGISTRY.load(kind, where)
    if isinstance(export, type) and issubclass(export, Filter):
        transform: Any = Transform(Section, lambda _settings: export())
    elif callable(export) and not isinstance(export, type):
        transform = Transform(Section, lambda _settings: _TensorFunctionFilter(kind, export))
    else:
        transform = export
    return REGISTRY.check_type(transform, kind, where, Transform)


class _TensorFunctionFilter(Filter):
    """Applies a function to each tensor."""

    def __init__(self, text: str, change: Callable[[Tensor], Tensor]) -> None:
        self.text, self._change = text, change

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self._change(x.detach()) for name, x in tensors.items()}
