"""The recipe's settings for the head."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_party.models.training import TrainingSettings
from vfl_party.outbound.filter import Amplifier
from vfl_party.phases.sets import SetSettings
from vfl_party.privacy.plan import DpSettings
from vfl_party.selfsup.settings import SupervisedAugment

# The settings that have an effect with boosted trees as the top model.
TREE_KEYS = frozenset({"own_encoder", "noise", "party_dropout"})
# The numbers of the two rounds. A checkpoint between them keeps the upload in case training fails.
UPLOAD, TRAIN = 0, 1


class HeadSettings(TrainingSettings, SetSettings):
    """Settings for training the top model on representations that are received once. A step is one
    batch.

    If a party is left out, zeros replace its representations, and the top model's weights for them
    become zero (FedOnce's laggy parties). The noise is "added to all the representations", as in
    FedOnce's Table 8. The ``mode`` of ``dp`` has no effect here.

    With ``model.top.kind = "gbdt"`` the phase grows trees, and only ``own_encoder``, ``noise`` and
    ``party_dropout`` have an effect. A missing party's representations are missing values there,
    and ``party_dropout`` leaves a party out of individual rows.
    """

    own_encoder: Literal["frozen", "trained"] = "frozen"
    """Whether the active party's encoder stays ``frozen`` after the earlier phase (SS-VFL-I), or is
    ``trained`` with the top model (FedOnce).
    """
    noise: Amplifier = 0.0
    """The standard deviation σ of the Gaussian noise that a passive party adds to its upload, and
    to its embeddings for evaluation and prediction.
    """
    deadline_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """The time in seconds that the active party waits for a party's whole upload. A later party is
    left out. Default: no limit.
    """
    dp: DpSettings | None = None
    """The settings of differential privacy for the training (FedOnce-L1). Default: none."""
    augment: SupervisedAugment | None = None
    """Random augmentation of the active party's rows in each batch, if its encoder is ``trained``.
    Default: none.
    """

    def model_post_init(self, context: Any) -> None:
        # Boosted trees need neither epochs nor steps; ``HeadMethod.check_top`` checks this.
        if self.epochs is not None or self.steps is not None:
            super().model_post_init(context)
        self.check_sets()
        if self.learns and self.deadline_s is not None:
            raise ValueError(
                "deadline_s removes what the model has learned from a late party, but "
                f"{self.learns} trains the model to work without parties. Remove one of them."
            )
        if self.learns and self.dp is not None:
            raise ValueError(
                f"dp limits the influence of a row on one output, but {self.learns} combines each "
                "row in several ways. Remove one of them."
            )
        if self.dp is not None and self.optimizer.clip_norm is not None:
            raise ValueError(
                "optimizer.clip_norm does not work with dp, which clips the gradient of each row. "
                "Remove clip_norm, and set dp.max_grad_norm."
            )
        if self.augment is not None and self.own_encoder == "frozen":
            raise ValueError(
                'augment needs own_encoder = "trained", because a frozen encoder embeds each row '
                'only once. Set own_encoder = "trained", or remove augment.'
            )
        if self.augment is not None and self.augment.corruption and self.dp is not None:
            raise ValueError(
                "augment.corruption copies numbers of other rows into a row, but dp limits what "
                "one row can change. Remove one of them."
            )
