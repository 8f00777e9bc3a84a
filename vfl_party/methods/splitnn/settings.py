"""The recipe's settings for split training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from vfl_common.config.base import KindName, Section
from vfl_common.config.recipe import Seconds
from vfl_party.absence import LatePolicy
from vfl_party.noise import Amplifier
from vfl_party.training import TrainingSettings


class EarlyStopping(Section):
    """Ends the phase when ``metric`` on the validation rows has not improved ``patience`` times in succession.

    All parties then restore their best weights.
    """

    patience: PositiveInt = 5
    metric: KindName = "loss"


class SplitNNSettings(TrainingSettings):
    """A step is one batch; a round is ``validate_every`` epochs, then validation and a checkpoint.

    ``checkpoint_steps``: more steps than this are several rounds, and only the last of them ends with validation. So
    after a death or a stop, no more are repeated though an epoch may take hours.
    ``max_bytes``: ends the phase, even within an epoch, with the step at which embeddings and gradients reach it. Their
    payload counts, over all passive parties (SplitNN-Comm of FedOnce's section 5.2). Validation does not count.
    ``late_policy``: what happens if a passive party's embeddings of a batch do not come within ``deadline_s`` seconds.
    ``wait``: the others wait. Otherwise the step goes on, and its encoder gets no update: ``zeros`` take the place of
    its embeddings, or the last embeddings of these rows (``cached``), or the others are combined alone (``skip``; with
    ``model.combine = "concat"`` this is the same as ``zeros``).
    """

    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1  # epochs; the batches of all of them are planned at once
    checkpoint_steps: PositiveInt = 2000
    max_bytes: PositiveInt | None = None
    iso: Amplifier = 0.0  # λ of the noise on the gradients that the active party sends
    early_stopping: EarlyStopping | None = None
    late_policy: LatePolicy = "wait"
    deadline_s: Seconds | None = None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.late_policy == "wait") != (self.deadline_s is None):
            raise ValueError('give late_policy ("zeros", "cached" or "skip") together with deadline_s, or neither')
        if self.late_policy != "wait" and self.early_stopping is not None:
            raise ValueError('early_stopping needs late_policy = "wait": a party that is away hears no verdict')
