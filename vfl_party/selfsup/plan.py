"""Fills in the defaults of a self-supervised phase's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfl_common.config.models import OptimizerSettings
from vfl_party.selfsup.augment.settings import AugmentSettings
from vfl_party.selfsup.settings import SelfSupSettings, Ssl

Negatives = Literal["queue", "batch"]
_WIDTHS = {
    "simsiam": (512, 512, 512),
    "byol": (512, 512, 512),
    "moco": (512, 512, 128),
    "simclr": (512, 512, 128),
}
_MOMENTUM = {"byol": 0.995, "moco": 0.99}
# The settings of FedHSSL's released code: the maximum L2 norm of a gradient, and the views of
# tables.
_CLIP = 5.0
_VIEWS = {"corrupt": "one", "replacement": "uniform", "exact_share": True}


@dataclass(frozen=True)
class SelfSupPlan:
    """The settings of a self-supervised phase with all defaults. ``negatives``: The source of
    negatives in losses between a party's own and received (or guiding) projections. MoCo's local
    loss always uses its queue.
    """

    ssl: Ssl
    batch_size: int
    widths: tuple[int, ...]
    hidden: int
    temperature: float
    queue: int
    momentum: float
    negatives: Negatives
    optimizer: OptimizerSettings
    augment: AugmentSettings
    anneals_predictor: bool

    def width(self, embedding: int) -> int:
        """Returns the width of the projections of embeddings of width ``embedding``."""
        return self.widths[-1] if self.widths else embedding

    @property
    def predicts(self) -> bool:
        """Whether the tower has a predictor. For MoCo and SimCLR, the predictor is the identity
        (FedHSSL, Table II).
        """
        return self.ssl in ("simsiam", "byol")

    @property
    def has_target(self) -> bool:
        """Whether the target encoder is a moving average. For SimSiam and SimCLR, the target
        encoder is the online encoder.
        """
        return self.ssl in ("byol", "moco")


def make_plan(
    settings: SelfSupSettings,
    preset: Literal["paper", "released"],
    gamma: float = 0.0,
    own: OptimizerSettings | None = None,
) -> SelfSupPlan:
    """Fills in the defaults of the method and the preset.

    The default learning rate is 0.05 · B / 256, times 0.5 / (0.5 + gamma) if the local loss has two
    guidance terms with the weight ``gamma``. ``own``: The optimizer of only this party; it takes
    precedence.
    """
    released = preset == "released"
    momentum = settings.momentum
    if momentum is None:
        momentum = 0.999 if released else _MOMENTUM.get(settings.ssl, 0.0)
    optimizer = (
        own
        or settings.optimizer
        or OptimizerSettings(
            kind="sgd",
            lr=0.05 * settings.batch_size / 256 * 0.5 / (0.5 + gamma),
            momentum=0.9,
            weight_decay=3e-5,
            schedule="cosine",
            clip_norm=_CLIP if released else None,
        )
    )
    anneals = settings.anneal_predictor
    return SelfSupPlan(
        ssl=settings.ssl,
        batch_size=settings.batch_size,
        widths=_WIDTHS[settings.ssl] if settings.projector is None else settings.projector,
        hidden=settings.predictor,
        temperature=settings.temperature,
        queue=settings.queue,
        momentum=momentum,
        negatives="batch" if released or settings.ssl == "simclr" else "queue",
        optimizer=optimizer,
        augment=_fill_released(settings.augment) if released else settings.augment,
        anneals_predictor=not released if anneals is None else anneals,
    )


def _fill_released(augment: AugmentSettings) -> AugmentSettings:
    """Returns the view settings of the released code. Keys that the recipe sets stay the same."""
    set_keys = augment.model_fields_set
    changed = {key: value for key, value in _VIEWS.items() if key not in set_keys}
    return AugmentSettings.model_construct(set_keys, **(augment.model_dump() | changed))
