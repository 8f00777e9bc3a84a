"""What a recipe says about split training."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings


class EarlyStopping(Section):
    """Ends the phase when ``metric`` on the validation rows has not improved for ``patience`` epochs; all parties then
    go back to their weights of the best epoch."""

    patience: PositiveInt = 5
    metric: Literal["loss", "accuracy", "auc", "f1", "rmse"] = "loss"

    @property
    def lower_is_better(self) -> bool:
        return self.metric in ("loss", "rmse")


class SplitNNSettings(Section):
    """Epochs over the training rows; a step is one batch."""

    epochs: PositiveInt
    batch_size: PositiveInt = 64
    optimizer: OptimizerSettings = OptimizerSettings()
    early_stopping: EarlyStopping | None = None
