"""What a recipe says about split training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_party.noise import Amplifier
from vfl_party.training import TrainingSettings


class EarlyStopping(Section):
    """Ends the phase when ``metric`` on the validation rows has not improved for ``patience`` rounds; all parties then
    go back to their weights of the best one."""

    patience: PositiveInt = 5
    metric: Literal["loss", "accuracy", "auc", "f1", "rmse"] = "loss"

    @property
    def lower_is_better(self) -> bool:
        return self.metric in ("loss", "rmse")


class SplitNNSettings(TrainingSettings):
    """A step is one batch; a round, after which the parties validate and keep a checkpoint, so many epochs.

    ``max_bytes``: ends the phase, within an epoch too, with the step whose embeddings and gradients, as payload and of
    all passive parties together, reach it (SplitNN-Comm of FedOnce's section 5.2). Validation does not count.
    """

    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1  # epochs, whose batches are all planned at once
    max_bytes: PositiveInt | None = None
    iso: Amplifier = 0.0  # λ of the noise on the gradients that the active party sends
    early_stopping: EarlyStopping | None = None
