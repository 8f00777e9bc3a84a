"""The recipe's settings for split training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings
from vfl_common.config.recipe_tables import Seconds
from vfl_party.models.training import EarlyStopping as EarlyStopping
from vfl_party.models.training import OwnOptimizers, TrainingSettings
from vfl_party.outbound.filter import Amplifier
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.sets import SetSettings
from vfl_party.selfsup.settings import SupervisedAugment


class CacheSettings(Section):
    """Settings of local updates on earlier batches. A row's weight is the cosine between exchanged
    and current values. The defaults are from CELU-VFL (arXiv 2207.14628): W = R = 5, ξ = 60°.
    """

    batches: Annotated[int, Field(ge=1, le=100)] = 5
    """The number W of last batches that are kept."""
    uses: Annotated[int, Field(ge=1, le=100)] = 5
    """The number R of updates on kept batches between two exchanges."""
    threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.5
    """The minimum cosine between exchanged and current values for a row to be used (cos ξ)."""


class SplitNNSettings(TrainingSettings, OwnOptimizers, SetSettings):
    """A step is one batch. A round is ``validate_every`` epochs, followed by validation and a
    checkpoint.

    ``max_bytes`` limits the payload of all passive parties together, and may end the phase within
    an epoch (SplitNN-Comm in FedOnce, section 5.2). With a ``late_policy`` other than ``wait``, a
    step continues without a late party, whose encoder is then not updated. Decision 0025 defines
    ``in_flight``, ``predict_weights`` (SpecTrain, arXiv 1809.02839), ``micro_batches``,
    ``local_updates`` (FedBCD-p, arXiv 1912.11187) and ``cache``.
    """

    # A plateau schedule is allowed here, because early stopping sends its verdicts to all parties.
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of each party."""
    optimizers: dict[str, OptimizerSettings] = Field(default_factory=dict)
    """The optimizers of individual parties, by the party's name, each instead of ``optimizer``."""
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    """The number of epochs between two validations, which form one round."""
    checkpoint_steps: PositiveInt = 2000
    """The maximum number of steps in a round. More steps become several rounds, and only the last
    of these ends with validation.
    """
    max_bytes: PositiveInt | None = None
    """The number of bytes of embeddings and gradients, over all passive parties, after which the
    phase ends. Validation does not count. Default: no limit.
    """
    iso: Amplifier = 0.0
    """The amplifier λ of isotropic noise on the gradients that the active party sends."""
    nopeek: Amplifier = 0.0
    """The weight λ of NoPeek: each passive party adds λ · log dCor(embeddings, columns) to its
    loss, so that embeddings reveal less about its columns.
    """
    dcor: Amplifier = 0.0
    """The weight λ of distance correlation: the active party adds λ · log dCor(embeddings, labels)
    to its loss, so that embeddings reveal less about the labels.
    """
    mid: Amplifier = 0.0
    """The weight λ of MID: passive parties' encoders draw embeddings at random, and λ times the KL
    divergence from N(0, 1) is added to their loss.
    """
    augment: SupervisedAugment | None = None
    """Random augmentation of the rows of each batch, independently at each party. Default: none."""
    early_stopping: EarlyStopping | None = None
    """When the phase ends before its last epoch (early stopping). Default: off."""
    late_policy: LatePolicy = "wait"
    """What happens if a party is late: the other parties ``wait``, its embeddings are replaced by
    ``zeros`` or by its last embeddings of the same rows (``cached``), or they are left out
    (``skip``).
    """
    deadline_s: Seconds | None = None
    """The time in seconds that a step waits for a party. Required with every ``late_policy`` except
    ``wait``.
    """
    in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    """The number D of batches that are in flight at the same time."""
    predict_weights: bool = False
    """Whether embeddings are computed with predicted weights (SpecTrain), if several batches are in
    flight.
    """
    micro_batches: Annotated[int, Field(ge=1, le=64)] = 1
    """The number M of parts in which a batch is exchanged."""
    local_updates: Annotated[int, Field(ge=1, le=100)] = 1
    """The number Q of updates on each batch, all but the first without an exchange (FedBCD)."""
    cache: CacheSettings | None = None
    """Settings of updates on earlier batches between two exchanges (CELU-VFL). Default: off."""

    @property
    def under_way(self) -> int:
        """The maximum number of a passive party's exchanges that are in flight at the same time."""
        return self.in_flight * self.micro_batches

    @property
    def plain(self) -> bool:
        """Whether each batch is exchanged as a whole, one at a time, and gives one update."""
        return self.under_way == 1 and not self.local

    @property
    def no_partial(self) -> str:
        """The reason why the phase does not support ``rows.partial``; see ``MethodFacts``."""
        if self.late_policy != "wait":
            return "late_policy needs parties that hold all rows"
        if self.max_bytes is not None:
            return "max_bytes needs batches of equal size at all parties"
        name = next((key for key in ("nopeek", "dcor") if getattr(self, key)), None)
        if name is not None:
            return f"{name} needs batches of several rows, but a party may hold only one of a batch"
        return "local_updates and cache need batches that all parties hold" * self.local

    @property
    def local(self) -> bool:
        """Whether the settings add updates without an exchange."""
        return self.local_updates > 1 or self.cache is not None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.late_policy == "wait") != (self.deadline_s is None):
            raise ValueError(
                'late_policy and deadline_s belong together. Set late_policy to "zeros", "cached" '
                'or "skip" and set deadline_s, or remove both.'
            )
        if self.late_policy != "wait" and self.early_stopping is not None:
            raise ValueError(
                'early_stopping needs late_policy = "wait", because an absent party does not '
                'receive the verdict. Set late_policy = "wait", or remove early_stopping.'
            )
        self._check_plateaus()
        self.check_sets()
        if self.late_policy == "zeros" and self.learns:
            raise ValueError(
                f'late_policy = "zeros" does not match {self.learns}, which trains the model to '
                'work without a party. Set late_policy to "skip" or "cached".'
            )
        if self.late_policy != "wait" and not self.plain:
            raise ValueError(
                'in_flight, micro_batches, local_updates and cache need late_policy = "wait". '
                "Remove them, or late_policy."
            )
        if self.predict_weights and (self.in_flight == 1 or self.local):
            raise ValueError(
                "predict_weights needs in_flight above 1 and one update for each exchange. Remove "
                "predict_weights, or change in_flight, local_updates and cache."
            )
        if self.micro_batches > 1 and self.iso:
            raise ValueError(
                "iso adds noise to whole batches. Set micro_batches = 1, or remove iso."
            )
        defence = next((name for name in ("nopeek", "dcor", "mid") if getattr(self, name)), None)
        if defence is not None and not self.plain:
            raise ValueError(
                f"{defence} needs whole batches with one update each. Remove {defence}, or "
                "in_flight, micro_batches, local_updates and cache."
            )
        if self.augment is not None and self.local:
            raise ValueError(
                "augment makes another view for each exchange, but local_updates and cache use "
                "rows again after their exchange. Remove one of them."
            )
        if self.augment is not None and self.nopeek:
            raise ValueError(
                "nopeek hides the original columns, but augment changes them. Remove one of them."
            )
        if self.cache is not None and self.local_updates > 1:
            raise ValueError(
                "local_updates and cache both add updates between two exchanges. Remove one of "
                "them."
            )

    def _check_plateaus(self) -> None:
        """Raises ValueError if a plateau schedule needs verdicts that are never sent, or sent too
        late.
        """
        for optimizer in (self.optimizer, *self.optimizers.values()):
            if optimizer.schedule != "plateau":
                continue
            if self.early_stopping is None:
                raise ValueError(
                    'schedule = "plateau" follows the validations of early_stopping. Add '
                    "early_stopping."
                )
            if optimizer.plateau_patience >= self.early_stopping.patience:
                raise ValueError(
                    "plateau_patience must be less than early_stopping.patience = "
                    f"{self.early_stopping.patience}, after which the phase ends (got "
                    f"{optimizer.plateau_patience}). Lower plateau_patience, or raise "
                    "early_stopping.patience."
                )
