"""The recipe's settings for split training."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from vfl_common.config.base import KindName, Section
from vfl_common.config.recipe import Seconds
from vfl_party.models.training import TrainingSettings
from vfl_party.outbound.noise import Amplifier
from vfl_party.phases.absence import LatePolicy


class EarlyStopping(Section):
    """Ends the phase when ``metric`` on the validation rows has not improved ``patience`` times in
    succession.

    All parties then restore their best weights.
    """

    patience: PositiveInt = 5
    metric: KindName = "loss"


class CacheSettings(Section):
    """Local updates on the last ``batches`` (W) batches, ``uses`` (R) of them between two
    exchanges.

    A row's weight is the cosine between what was exchanged and what it is now, 0 below
    ``threshold`` (cos ξ). The defaults are those of CELU-VFL (arXiv 2207.14628): W = R = 5, ξ =
    60°.
    """

    batches: Annotated[int, Field(ge=1, le=100)] = 5
    uses: Annotated[int, Field(ge=1, le=100)] = 5
    threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.5


class SplitNNSettings(TrainingSettings):
    """A step is one batch; a round is ``validate_every`` epochs, then validation and a checkpoint.

    ``checkpoint_steps``: more steps than this are several rounds, and only the last of them ends
    with validation. So after a death or a stop, no more are repeated though an epoch may take
    hours. ``max_bytes``: ends the phase, even within an epoch, with the step at which embeddings
    and gradients reach it. Their payload counts, over all passive parties (SplitNN-Comm of
    FedOnce's section 5.2). Validation does not count. ``nopeek``: each passive party adds λ · log
    dCor(z, x) to its own loss, so that embeddings tell less of its columns. ``dcor``: the active
    party adds λ · log dCor(z, y) to its loss, so that embeddings tell less of the labels. ``mid``:
    each passive party's encoder draws its embeddings, and λ · KL to N(0, 1) is added to its loss
    (MID). ``late_policy``: what happens if a passive party's embeddings of a batch do not come
    within ``deadline_s`` seconds. ``wait``: the others wait. Otherwise the step goes on, and its
    encoder gets no update: ``zeros`` take the place of its embeddings, or the last embeddings of
    these rows (``cached``), or the others are combined alone (``skip``; with ``model.combine =
    "concat"`` this is the same as ``zeros``). ``in_flight`` (D): this many batches are under way:
    the embeddings of batch t + D - 1 leave before the gradient of batch t has come.
    ``predict_weights``: they are computed with the weights that the next updates would give if each
    were as the last one (SpecTrain, arXiv 1809.02839). ``micro_batches`` (M): a batch is exchanged
    in M parts. ``local_updates`` (Q): Q updates a batch, all but the first without an exchange
    (FedBCD-p, arXiv 1912.11187). ``cache``: updates on earlier batches between two exchanges. All
    are defined in decision 0025.
    """

    # Epochs; the batches of all of them are planned at once.
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    checkpoint_steps: PositiveInt = 2000
    max_bytes: PositiveInt | None = None
    # λ of the noise on the gradients that the active party sends.
    iso: Amplifier = 0.0
    nopeek: Amplifier = 0.0
    dcor: Amplifier = 0.0
    mid: Amplifier = 0.0
    early_stopping: EarlyStopping | None = None
    late_policy: LatePolicy = "wait"
    deadline_s: Seconds | None = None
    in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    predict_weights: bool = False
    micro_batches: Annotated[int, Field(ge=1, le=64)] = 1
    local_updates: Annotated[int, Field(ge=1, le=100)] = 1
    cache: CacheSettings | None = None

    @property
    def under_way(self) -> int:
        """The number of exchanges of one passive party that may be under way."""
        return self.in_flight * self.micro_batches

    @property
    def plain(self) -> bool:
        """Whether each batch is exchanged whole and on its own, and gives one update."""
        return self.under_way == 1 and not self.local

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
        if self.cache is not None and self.local_updates > 1:
            raise ValueError(
                "give local_updates or cache, not both: both are updates between two exchanges"
            )
