"""The recipe's settings for FedOnce's local learning. The defaults are the paper's for tabular data
(Table 5).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.models import OptimizerSettings, Temperature, UnjudgedOptimizer
from vfl_common.config.models import PositiveInt as Width
from vfl_party.models.training import OwnOptimizers
from vfl_party.privacy.plan import DpSettings
from vfl_party.selfsup.settings import AugmentSettings

Output = Literal["tanh", "linear", "sphere"]

# The optimizer of the passive parties in the paper's Table 5.
ADAM = OptimizerSettings(kind="adam", lr=1e-4, weight_decay=1e-5)

_ALL = {"objective", "rows", "active"}
_TRAINED = _ALL | {"epochs", "batch_size", "optimizer", "optimizers", "output"}
_KEYS = {
    "nat": _TRAINED | {"match_every", "matching", "dp"},
    "pca": _ALL,
    "reconstruction": _TRAINED | {"decoder", "dp"},
    "contrastive": _TRAINED | {"projector", "temperature", "augment"},
}


class FedOnceSettings(OwnOptimizers):
    """One round is one epoch; ``pca`` has one round. The defaults are the paper's Table 5."""

    objective: Literal["nat", "pca", "reconstruction", "contrastive"] = "nat"
    """How a party learns: from noise as targets (``nat``), by principal components (``pca``), as an
    autoencoder (``reconstruction``), or from two views of each row (``contrastive``).
    """
    rows: Literal["train", "local"] = "train"
    """``train``: the aligned rows with labels, which are uploaded later. ``local``: all of the
    party's training rows.
    """
    active: bool = False
    """Whether the active party also learns its encoder in this way."""
    epochs: PositiveInt = 100
    """The number of epochs, each a round; ``pca`` has one round."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 100
    """The number of rows in a batch. The time of matching grows with its cube, so use at most 256
    with ``nat``.
    """
    optimizer: UnjudgedOptimizer | None = None
    """The optimizer. Default: Adam with learning rate 1e-4 and weight decay 1e-5; for
    ``contrastive``, SGD whose learning rate depends on the batch size.
    """
    output: Output | None = None
    """The encoder's output: ``tanh``, ``linear``, or ``sphere`` (norm 1). Default: ``tanh`` for
    ``nat`` on columns, else ``linear``.
    """
    matching: bool = True
    """``nat``: whether targets are reassigned within each batch. Differential privacy requires
    false.
    """
    match_every: PositiveInt = 1
    """``nat``: the number of epochs from one matching to the next."""
    decoder: tuple[Width, ...] = (128,)
    """``reconstruction``: the widths of the decoder's hidden layers."""
    projector: tuple[Width, ...] | None = None
    """``contrastive``: the widths of the projector's layers; ``[]``: no projector."""
    temperature: Temperature = 0.2
    """``contrastive``: the temperature, by which cosine similarities are divided."""
    augment: AugmentSettings = AugmentSettings()
    """``contrastive``: how the two views of a row are made."""
    dp: DpSettings | None = None
    """``nat``, ``reconstruction``: the settings of differential privacy (FedOnce-L1). Default:
    none.
    """

    def model_post_init(self, _context: Any) -> None:
        if self.dp is not None and "dp" not in _KEYS[self.objective]:
            raise ValueError(
                f"dp works with objective = 'nat' or 'reconstruction' (got {self.objective!r}). "
                "Change objective, or remove dp."
            )
        for key in sorted(self.model_fields_set - _KEYS[self.objective]):
            raise ValueError(
                f"{key} has no effect with objective = {self.objective!r}. Remove {key}."
            )
        if not self.matching and "match_every" in self.model_fields_set:
            raise ValueError(
                "match_every has no effect with matching = false. Remove match_every, or set "
                "matching = true."
            )
        if self.dp is not None:
            self._check_private(self.dp)

    def _check_private(self, dp: DpSettings) -> None:
        if self.rows != "train":
            raise ValueError(
                "rows = 'local' does not work with dp, because the number of rows that only one "
                "party has is unknown. Set rows = 'train'."
            )
        optimizers = [self.optimizer, *self.optimizers.values()]
        if any(
            optimizer is not None and optimizer.clip_norm is not None for optimizer in optimizers
        ):
            raise ValueError(
                "optimizer.clip_norm does not work with dp, which clips the gradient of each row. "
                "Remove clip_norm, and set dp.max_grad_norm."
            )
        if dp.mode == "matched":
            if self.objective != "nat" or not self.matching:
                raise ValueError(
                    "dp.mode = 'matched' needs objective = 'nat' with matching. Remove dp.mode."
                )
            return
        for key in sorted({"matching", "match_every"} & self.model_fields_set):
            if key == "match_every" or self.matching:
                raise ValueError(
                    f"{key} does not work with dp, because it makes a row's target depend on "
                    f"other rows. Remove {key}, or set dp.mode = 'matched', which guarantees "
                    "nothing."
                )

    @property
    def matches(self) -> bool:
        """Whether targets are reassigned within each batch."""
        return self.matching and (self.dp is None or self.dp.mode == "matched")
