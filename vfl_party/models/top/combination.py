"""Combinations of plug-ins, which other packages export as entry points of ``vfl.combinations``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vfl_common.config.base import Section, parse
from vfl_common.config.models import COMBINATIONS, Combine, PluginCombination
from vfl_common.errors import Code, InputError
from vfl_party.base.dtypes import real
from vfl_party.base.plugins import PlugIns, where_it_failed
from vfl_party.models.encoders.custom import module_of

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Combination(Generic[S]):
    """The type that an entry point of ``vfl.combinations`` names.

    Args:
        settings: the keys of ``model.combine`` besides ``kind``.
        build: (settings, width of an embedding, number of embeddings) -> the module that combines.
            It takes float32 [B, K, D], the active party's embedding first, then in the recipe's
            order, and gives float32 [B, width], whose width is its own. K is the number of
            embeddings; under ``late_policy = "skip"`` it is less if a party is away.
    """

    settings: type[S]
    build: Callable[[S, int, int], nn.Module]


class _NoSettings(Section):
    """The settings of a bare function: none."""


class _Function(nn.Module):
    """A function as a module without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, z_BKD: Tensor) -> Tensor:
        return self._function(z_BKD)


PLUGINS = PlugIns("vfl.combinations", "combination", ours=COMBINATIONS)
_WHERE = "recipe: model.combine"


def check_combination(settings: Combine) -> None:
    """Raises InputError if no plug-in has such a combination, or if its settings are wrong."""
    if isinstance(settings, PluginCombination):
        _load(settings)


def build_combination(
    settings: PluginCombination, width: int, embeddings: int
) -> tuple[nn.Module, int]:
    """Builds the combination of a plug-in; returns it, and the width of what it gives.

    Raises InputError (MODEL_INVALID) if that fails, if it fails on two rows of zeros, or if it
    gives another shape or type.
    """
    where = f"{_WHERE} = {settings.kind!r}"
    export, own = _load(settings)
    made = module_of(lambda: export.build(own, width, embeddings), where, "the plug-in")
    mode = made.training
    made.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            out = made(torch.zeros(2, embeddings, width))
    except Exception as error:
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: failed on two rows of {embeddings} embeddings of {width} numbers "
            f"{where_it_failed(error)}. Correct the plug-in.",
        ) from error
    made.train(mode)
    if not isinstance(out, Tensor) or out.dtype != real() or out.shape[:-1] != (2,):
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: must return float32 of shape [2, width] for two rows (got "
            f"{_describe(out)}). Correct the plug-in.",
        )
    return made, out.shape[1]


def _describe(out: object) -> str:
    if isinstance(out, Tensor):
        return f"{out.dtype} of shape {list(out.shape)}"
    return type(out).__name__


def _load(settings: PluginCombination) -> tuple[Combination[Any], Section]:
    loaded = PLUGINS.load(settings.kind, _WHERE)
    alone = callable(loaded) and not isinstance(loaded, type)
    made = Combination(_NoSettings, lambda *_: _Function(loaded)) if alone else loaded
    export = PLUGINS.check_type(made, settings.kind, _WHERE, Combination)
    own: Section = parse(export.settings, settings.settings, _WHERE)
    return export, own
