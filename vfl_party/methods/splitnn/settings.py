"""The recipe's settings for split training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_party.noise import Amplifier
from vfl_party.training import TrainingSettings


class EarlyStopping(Section):
    """Ends the phase when ``metric`` on the validation rows has not improved for ``patience`` rounds.

    All parties then restore their weights of the best round.
    """

    patience: PositiveInt = 5
    metric: Literal["loss", "accuracy", "auc", "f1", "rmse"] = "loss"

    @property
    def lower_is_better(self) -> bool:
        return self.metric in ("loss", "rmse")


class SplitNNSettings(TrainingSettings):
    """A step is one batch; a round is ``validate_every`` epochs, then validation and a checkpoint.

    ``max_bytes``: ends the phase, even within an epoch, with the step at which embeddings and gradients reach it. Their
    payload counts, over all passive parties (SplitNN-Comm of FedOnce's section 5.2). Validation does not count.
    """

    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1  # epochs; the batches of all of them are planned at once
    max_bytes: PositiveInt | None = None
    iso: Amplifier = 0.0  # λ of the noise on the gradients that the active party sends
    early_stopping: EarlyStopping | None = None
