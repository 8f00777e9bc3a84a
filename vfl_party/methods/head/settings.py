"""What a recipe says about the head."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_party.noise import Amplifier
from vfl_party.privacy.settings import DpSettings
from vfl_party.training import TrainingSettings

UPLOAD, TRAIN = 0, 1  # the two rounds: a checkpoint lies between them, so that a later death need not repeat the upload


class HeadSettings(TrainingSettings):
    """Training of the top model on representations that are received once. A step is one batch.

    ``deadline_s``: a party whose upload is not whole so long after the active party began to wait for it is left out:
    zeros stand for its representations, and its part of the top model is zero (FedOnce's laggy parties).
    ``own_encoder``: the active party's; ``frozen`` as the phase before left it (SS-VFL-I), or ``trained`` together with
    the top model (FedOnce). ``noise``: σ of what a passive party adds to its upload, and to all that it sends for
    evaluation and prediction afterwards (FedOnce, Table 8: "added to all the representations"). ``dp``: the training is
    private (FedOnce-L1); its ``mode`` means nothing here.
    """

    own_encoder: Literal["frozen", "trained"] = "frozen"
    noise: Amplifier = 0.0
    deadline_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    dp: DpSettings | None = None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.dp is not None and self.optimizer.clip_norm is not None:
            raise ValueError("optimizer.clip_norm is not for dp, which clips the gradient of each row: max_grad_norm")
