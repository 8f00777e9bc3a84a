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
from vfl_party.base.dtypes import get_real_dtype
from vfl_party.base.plugins import PlugIns, describe_failure
from vfl_party.models.encoders.custom import module_of

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Combination(Generic[S]):
    """The type that an entry point of ``vfl.combinations`` names.

    Args:
        settings: The class of the settings in ``model.combine``, without ``kind``.
        build: A function (settings, width D of an embedding, number K of embeddings) -> a module.
            The module takes float32 [B, K, D] with the active party's embedding first and the
            others in the recipe's order. It returns float32 [B, width] of any width. With
            ``late_policy = "skip"`` K is smaller if a party is absent.
    """

    settings: type[S]
    build: Callable[[S, int, int], nn.Module]


class _NoSettings(Section):
    """The empty settings of a combination that is a bare function."""


class _Function(nn.Module):
    """Wraps a function as a module without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, z_BKD: Tensor) -> Tensor:
        return self._function(z_BKD)


PLUGINS = PlugIns("vfl.combinations", "combination", ours=COMBINATIONS)
_WHERE = "recipe: model.combine"


def check_combination(settings: Combine) -> None:
    """Raises InputError if no plug-in has this combination, or if its settings are invalid."""
    if isinstance(settings, PluginCombination):
        _load(settings)


def build_combination(
    settings: PluginCombination, width: int, embeddings: int
) -> tuple[nn.Module, int]:
    """Builds the combination of a plug-in. Returns the module and the width of its output.

    Raises InputError (MODEL_INVALID) if the plug-in fails, or if the module fails on two rows of
    zeros or returns another shape or dtype.
    """
    where = f"{_WHERE} = {settings.kind!r}"
    export, parsed_settings = _load(settings)
    combination = module_of(
        lambda: export.build(parsed_settings, width, embeddings), where, "the plug-in"
    )
    mode = combination.training
    combination.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            out = combination(torch.zeros(2, embeddings, width))
    except Exception as error:
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: failed on two rows of {embeddings} embeddings of {width} numbers "
            f"{describe_failure(error)}. Correct the plug-in.",
        ) from error
    combination.train(mode)
    if not isinstance(out, Tensor) or out.dtype != get_real_dtype() or out.shape[:-1] != (2,):
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: must return float32 of shape [2, width] for two rows (got "
            f"{_describe(out)}). Correct the plug-in.",
        )
    return combination, out.shape[1]


def _describe(out: object) -> str:
    if isinstance(out, Tensor):
        return f"{out.dtype} of shape {list(out.shape)}"
    return type(out).__name__


def _load(settings: PluginCombination) -> tuple[Combination[Any], Section]:
    loaded = PLUGINS.load(settings.kind, _WHERE)
    is_function = callable(loaded) and not isinstance(loaded, type)
    wrapped = Combination(_NoSettings, lambda *_: _Function(loaded)) if is_function else loaded
    export = PLUGINS.check_type(wrapped, settings.kind, _WHERE, Combination)
    parsed_settings: Section = parse(export.settings, settings.settings, _WHERE)
    return export, parsed_settings
