"""Losses of plug-ins, which other packages export as entry points of ``vfl.losses``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from vfl_common.config.base import Section, parse
from vfl_common.config.task import LOSSES, PluginLossSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import PlugIns, where_it_failed

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class LossOfRows(Generic[S]):
    """The type that an entry point of ``vfl.losses`` names.

    Args:
        settings: the keys of ``task.loss`` besides ``kind``.
        compute: (settings, outputs, targets) -> the loss of each row [N], of the outputs' type.
            Each number must depend on its own row alone: parts of a batch are computed apart, and
            rows are weighted. Outputs are what the top model gives: logits [N, 1] and targets
            float [N, 1] (``binary``), logits [N, classes] and targets int64 [N] (``multiclass``),
            logits and targets [N, labels] (``multilabel``), or values and targets [N, 1], both
            scaled (``regression``).
    """

    settings: type[S]
    compute: Callable[[S, Tensor, Tensor], Tensor]


class NoSettings(Section):
    """The settings of a bare function: none."""


PLUGINS = PlugIns("vfl.losses", "loss", ours=LOSSES)
_WHERE = "recipe: task.loss"


def rows_loss(settings: PluginLossSettings) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the plug-in's ``loss(outputs_NO, targets)``: the loss of each row, [N].

    A bare function is a loss without settings: ``loss(outputs_NO, targets)``. Raises InputError if
    there is no such loss or its settings are wrong, and, when it is called, if it fails or does not
    give a number for each row.
    """
    loaded = PLUGINS.load(settings.kind, _WHERE)
    made = _of_function(loaded) if callable(loaded) and not isinstance(loaded, type) else loaded
    export = PLUGINS.check_type(made, settings.kind, _WHERE, LossOfRows)
    own = parse(export.settings, settings.settings, _WHERE)
    return _check_output(export, own, f"{_WHERE}: the loss {settings.kind!r}")


def _of_function(function: Callable[[Tensor, Tensor], Tensor]) -> LossOfRows[NoSettings]:
    return LossOfRows(NoSettings, lambda _, outputs, targets: function(outputs, targets))


def _check_output(
    export: LossOfRows[Any], own: Section, where: str
) -> Callable[[Tensor, Tensor], Tensor]:
    def of_rows(outputs_NO: Tensor, targets: Tensor) -> Tensor:
        try:
            each_N = export.compute(own, outputs_NO, targets)
        except VflError:
            raise
        # It may raise anything.
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} failed {where_it_failed(error)}. Correct the plug-in.",
            ) from error
        if not isinstance(each_N, Tensor):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return {outputs_NO.dtype} of shape [{len(outputs_NO)}], one number "
                f"per row (got {type(each_N).__name__}). Correct the plug-in.",
            )
        if each_N.shape != outputs_NO.shape[:1] or each_N.dtype != outputs_NO.dtype:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return {outputs_NO.dtype} of shape [{len(outputs_NO)}], one number "
                f"per row (got {each_N.dtype} of shape {list(each_N.shape)}). Correct the plug-in.",
            )
        if outputs_NO.requires_grad and not each_N.requires_grad:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return numbers with a gradient. Compute them with torch.",
            )
        return each_N

    return of_rows
