"""Losses of plug-ins, which other packages export as entry points of ``vfl.losses``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from vfl_common.config.base import Section, parse
from vfl_common.config.task import LOSSES, PluginLossSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import PlugIns, describe_failure

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class LossOfRows(Generic[S]):
    """The type that an entry point of ``vfl.losses`` names.

    Args:
        settings: The class of the settings in ``task.loss``, without ``kind``.
        compute: A function (settings, outputs, targets) -> the loss of each row [N], in the dtype
            of the outputs. The loss of a row must depend only on this row, because a batch may be
            computed in parts and rows are weighted. Outputs and targets are logits [N, 1] and float
            [N, 1] for ``binary``, logits [N, classes] and int64 [N] for ``multiclass``, logits [N,
            labels] and float [N, labels] for ``multilabel``, or scaled values [N, 1] and [N, 1] for
            ``regression``.
    """

    settings: type[S]
    compute: Callable[[S, Tensor, Tensor], Tensor]


class NoSettings(Section):
    """The empty settings of a loss that is a bare function."""


PLUGINS = PlugIns("vfl.losses", "loss", ours=LOSSES)
_WHERE = "recipe: task.loss"


def rows_loss(settings: PluginLossSettings) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a plug-in's loss function ``loss(outputs_NO, targets)`` -> the loss of each row [N].

    A plug-in may export a bare function, which has no settings. Raises InputError if no installed
    plug-in has this loss or if its settings are invalid. The returned function raises InputError if
    the plug-in fails or does not return one number for each row.
    """
    loaded = PLUGINS.load(settings.kind, _WHERE)
    wrapped = (
        _wrap_function(loaded) if callable(loaded) and not isinstance(loaded, type) else loaded
    )
    export = PLUGINS.check_type(wrapped, settings.kind, _WHERE, LossOfRows)
    settings_of_plugin = parse(export.settings, settings.settings, _WHERE)
    return _check_output(export, settings_of_plugin, f"{_WHERE}: the loss {settings.kind!r}")


def _wrap_function(function: Callable[[Tensor, Tensor], Tensor]) -> LossOfRows[NoSettings]:
    return LossOfRows(NoSettings, lambda _, outputs, targets: function(outputs, targets))


def _check_output(
    export: LossOfRows[Any], settings: Section, where: str
) -> Callable[[Tensor, Tensor], Tensor]:
    def compute_row_losses(outputs_NO: Tensor, targets: Tensor) -> Tensor:
        try:
            losses_N = export.compute(settings, outputs_NO, targets)
        except VflError:
            raise
        # The plug-in may raise any exception.
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} failed {describe_failure(error)}. Correct the plug-in.",
            ) from error
        if not isinstance(losses_N, Tensor):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return {outputs_NO.dtype} of shape [{len(outputs_NO)}], one number "
                f"per row (got {type(losses_N).__name__}). Correct the plug-in.",
            )
        if losses_N.shape != outputs_NO.shape[:1] or losses_N.dtype != outputs_NO.dtype:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return {outputs_NO.dtype} of shape [{len(outputs_NO)}], one number "
                f"per row (got {losses_N.dtype} of shape {list(losses_N.shape)}). Correct the "
                "plug-in.",
            )
        if outputs_NO.requires_grad and not losses_N.requires_grad:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return numbers with a gradient. Compute them with torch.",
            )
        return losses_N

    return compute_row_losses
