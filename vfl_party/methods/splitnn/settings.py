"""The recipe's settings for split training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings
from vfl_common.config.recipe_tables import Seconds
from vfl_party.models.training import EarlyStopping as EarlyStopping
from vfl_party.models.training import OwnOptimizers, TrainingSettings
from vfl_party.outbound.noise import Amplifier
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.sets import SetSettings
from vfl_party.selfsup.augment.settings import SupervisedAugment


class CacheSettings(Section):
    """Local updates on earlier batches. A row's weight is the cosine between exchanged and present
    values. The defaults are those of CELU-VFL (arXiv 2207.14628): W = R = 5, ξ = 60°.
    """

    batches: Annotated[int, Field(ge=1, le=100)] = 5
    """How many of the last batches are kept (W)."""
    uses: Annotated[int, Field(ge=1, le=100)] = 5
    """Updates on kept batches between two exchanges (R)."""
    threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.5
    """The least cosine between exchanged and present values with which a row counts (cos ξ)."""


class SplitNNSettings(TrainingSettings, OwnOptimizers, SetSettings):
    """A step is one batch; a round is ``validate_every`` epochs, then validation and a checkpoint.

    ``max_bytes`` counts the payload over all passive parties, and may end the phase within an epoch
    (SplitNN-Comm of FedOnce's section 5.2). With a ``late_policy`` other than ``wait``, the step
    goes on without the late party, and its encoder gets no update. Decision 0025 defines
    ``in_flight``, ``predict_weights`` (SpecTrain, arXiv 1809.02839), ``micro_batches``,
    ``local_updates`` (FedBCD-p, arXiv 1912.11187) and ``cache``.
    """

    # Early stopping tells all parties what a schedule of plateaus needs.
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of each party."""
    optimizers: dict[str, OptimizerSettings] = Field(default_factory=dict)
    """The optimizers of single parties, by the party's name, each in place of ``optimizer``."""
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    """Epochs between two validations; together they are one round."""
    checkpoint_steps: PositiveInt = 2000
    """The most steps of a round. More steps are several rounds, and only the last of them ends with
    validation.
    """
    max_bytes: PositiveInt | None = None
    """Bytes of embeddings and gradients, over all passive parties, at which the phase ends.
    Validation does not count. Default: no limit.
    """
    iso: Amplifier = 0.0
    """The amplifier λ of isotropic noise on the gradients that the active party sends."""
    nopeek: Amplifier = 0.0
    """λ: each passive party adds λ · log dCor(embeddings, columns) to its loss, so that embeddings
    tell less of its columns.
    """
    dcor: Amplifier = 0.0
    """λ: the active party adds λ · log dCor(embeddings, labels) to its loss, so that embeddings
    tell less of the labels.
    """
    mid: Amplifier = 0.0
    """λ: passive encoders draw their embeddings, and λ · KL to N(0, 1) is added to their loss."""
    augment: SupervisedAugment | None = None
    """Random changes of the rows of each batch, at each party by itself. Default: none."""
    early_stopping: EarlyStopping | None = None
    """When the phase ends before its last epoch. Default: off."""
    late_policy: LatePolicy = "wait"
    """What replaces the embeddings of a party that is late: the others ``wait``; ``zeros``; the
    last embeddings of the same rows (``cached``); or the others are combined alone (``skip``).
    """
    deadline_s: Seconds | None = None
    """Seconds that a step waits for a party; every ``late_policy`` but ``wait`` needs it."""
    in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    """Batches that are under way at the same time (D)."""
    predict_weights: bool = False
    """With several batches in flight: whether embeddings are computed with predicted weights
    (SpecTrain).
    """
    micro_batches: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts in which a batch is exchanged (M)."""
    local_updates: Annotated[int, Field(ge=1, le=100)] = 1
    """Updates on each batch, all but the first without an exchange (Q, FedBCD)."""
    cache: CacheSettings | None = None
    """Updates on earlier batches between two exchanges (CELU-VFL). Default: off."""

    @property
    def under_way(self) -> int:
        """The number of exchanges of one passive party that may be under way."""
        return self.in_flight * self.micro_batches

    @property
    def plain(self) -> bool:
        """Whether each batch is exchanged whole and on its own, and gives one update."""
        return self.under_way == 1 and not self.local

    @property
    def no_partial(self) -> str:
        """See ``Method.no_partial``."""
        if self.late_policy != "wait":
            return "late_policy is for parties that hold all rows and are late"
        if self.max_bytes is not None:
            return "max_bytes counts the same bytes of each batch at all parties"
        name = next((each for each in ("nopeek", "dcor") if getattr(self, each)), None)
        if name is not None:
            return f"{name} needs batches of several rows, of which a party may hold one"
        return "local_updates and cache train on batches that all parties hold" * self.local

    @property
    def local(self) -> bool:
        """Whether there are updates without an exchange."""
        return self.local_updates > 1 or self.cache is not None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (self.late_policy == "wait") != (self.deadline_s is None):
            raise ValueError(
                'give late_policy ("zeros", "cached" or "skip") together with deadline_s, '
                "or neither"
            )
        if self.late_policy != "wait" and self.early_stopping is not None:
            raise ValueError(
                'early_stopping needs late_policy = "wait": a party that is away hears no verdict'
            )
        self._check_plateaus()
        self.check_sets()
        if self.late_policy == "zeros" and self.learns:
            text = f'late_policy = "zeros" is not what {self.learns} learns to do without a party'
            raise ValueError(f'{text}; set it to "skip", or to "cached"')
        if self.late_policy != "wait" and not self.plain:
            text = 'in_flight, micro_batches, local_updates and cache need late_policy = "wait"'
            raise ValueError(f"{text}; remove them, or the policy")
        if self.predict_weights and (self.in_flight == 1 or self.local):
            text = "predict_weights is for in_flight above 1, and for one update an exchange"
            raise ValueError(f"{text}; remove it, or change in_flight, local_updates and cache")
        if self.micro_batches > 1 and self.iso:
            raise ValueError("iso is noise for whole batches; set micro_batches = 1, or remove iso")
        defence = next((name for name in ("nopeek", "dcor", "mid") if getattr(self, name)), None)
        if defence is not None and not self.plain:
            text = f"{defence} is for whole batches with one update each"
            raise ValueError(
                f"{text}; remove it, or in_flight, micro_batches, local_updates and cache"
            )
        if self.augment is not None and self.local:
            text = "augment gives each exchange a view of its own, and local_updates and cache"
            raise ValueError(f"{text} use rows again after their exchange; remove one of them")
        if self.augment is not None and self.nopeek:
            text = "nopeek hides the columns as they are, and augment changes them"
            raise ValueError(f"{text}; remove one of them")
        if self.cache is not None and self.local_updates > 1:
            raise ValueError(
                "give local_updates or cache, not both: both are updates between two exchanges"
            )

    def _check_plateaus(self) -> None:
        """Raises ValueError if a schedule waits for verdicts that never come, or come too late."""
        for each in (self.optimizer, *self.optimizers.values()):
            if each.schedule != "plateau":
                continue
            if self.early_stopping is None:
                text = 'schedule = "plateau" goes by the validations of early_stopping'
                raise ValueError(f"{text}; add early_stopping")
            if each.plateau_patience >= self.early_stopping.patience:
                most = self.early_stopping.patience
                text = f"plateau_patience = {each.plateau_patience} must be below"
                text = f"{text} early_stopping.patience = {most}, with which the phase ends"
                raise ValueError(f"{text}; lower the one, or raise the other")
