"""The common settings of self-supervised phases and of views. Defaults: FedHSSL, appendix B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Probability, Temperature, UnjudgedOptimizer
from vfl_common.config.models import PositiveInt as Width
from vfl_common.config.recipe_tables import Name
from vfl_party.models.training import OwnOptimizers

# The keys that apply to tables; all others apply to images.
OF_TABLES = frozenset({"corruption", "corrupt", "replacement", "exact_share"})
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class AugmentSettings(Section):
    """Settings for views of images and of tables. The defaults for images are SimSiam's for small
    images (without blur). The area of a crop is drawn uniformly, and its ratio uniformly on a log
    scale.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    """The minimum and the maximum area of a crop, as shares of the image's area."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The least and the largest width / height of a crop."""
    flip: Share = 0.5
    """The probability that an image is mirrored."""
    jitter: Share = 0.8
    """The probability that an image's colours change."""
    brightness: Share = 0.4
    """A jitter's factor of brightness is drawn from 1 ± this."""
    contrast: Share = 0.4
    """A jitter's factor of contrast is drawn from 1 ± this."""
    saturation: Share = 0.4
    """A jitter's factor of saturation is drawn from 1 ± this; three channels."""
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """The most by which a jitter turns the hue, as a share of the full circle; three channels."""
    grayscale: Share = 0.2
    """The probability that an image becomes grey; three channels."""
    blur: Share = 0.0
    """The probability that an image is blurred."""
    corruption: Share = 0.3
    """Tables: the probability that a feature is replaced by another row's."""
    corrupt: Literal["both", "one"] = "both"
    """Tables: whether features are replaced in both views (the papers) or in one view (FedHSSL's
    released code).
    """
    replacement: Literal["rows", "uniform"] = "rows"
    """Tables: the replacement of a number: the value of another row, or a number drawn uniformly
    between the column's minimum and maximum. Default: ``rows``, with preset ``released``
    ``uniform``.
    """
    exact_share: bool = False
    """Tables: whether exactly the share ``corruption`` of each row's features is replaced, rounded
    down, instead of this share on average. Default: false, with preset ``released`` true.
    """

    def model_post_init(self, _context: Any) -> None:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                "crop_scale must be two shares of the area with 0 < lowest <= highest <= 1 (got "
                f"[{low}, {high}]). Correct crop_scale."
            )
        low, high = self.crop_ratio
        if not 0.01 <= low <= high <= 100:
            raise ValueError(
                "crop_ratio must be two ratios of width to height with 0.01 <= lowest <= highest "
                f"<= 100 (got [{low}, {high}]). Correct crop_ratio."
            )


class SupervisedAugment(Section):
    """Settings for random changes of the rows of each training batch. By default, nothing is
    changed. Images and tables have the keys of ``AugmentSettings``.
    """

    parties: tuple[Name, ...] = ()
    """The parties whose rows are changed. Default: all parties with features."""
    crop_scale: tuple[float, float] = (1.0, 1.0)
    """The minimum and the maximum area of a crop, as shares of the image's area. By default, images
    are not cropped.
    """
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The least and the largest width / height of a crop."""
    flip: Share = 0.0
    """The probability that an image is mirrored."""
    jitter: Share = 0.0
    """The probability that an image's colours change."""
    brightness: Share = 0.4
    """A jitter's factor of brightness is drawn from 1 ± this."""
    contrast: Share = 0.4
    """A jitter's factor of contrast is drawn from 1 ± this."""
    saturation: Share = 0.4
    """A jitter's factor of saturation is drawn from 1 ± this; three channels."""
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """The most by which a jitter turns the hue, as a share of the full circle; three channels."""
    grayscale: Share = 0.0
    """The probability that an image becomes grey; three channels."""
    blur: Share = 0.0
    """The probability that an image is blurred."""
    corruption: Share = 0.0
    """Tables: the probability that a feature is replaced by another row's."""

    def model_post_init(self, _context: Any) -> None:
        # Making the settings of a view checks the values for crops.
        self.view()
        if not (self.of_images or self.corruption):
            raise ValueError(
                "augment changes nothing. Set crop_scale, flip, jitter, grayscale or blur for "
                "images, or corruption for tables."
            )

    @property
    def of_images(self) -> bool:
        """Whether the settings change images."""
        crops = self.crop_scale != (1.0, 1.0)
        return bool(crops or self.flip or self.jitter or self.grayscale or self.blur)

    def view(self) -> AugmentSettings:
        """Returns the settings of one view. Raises ValueError if a crop cannot be made."""
        return AugmentSettings(**self.model_dump(exclude={"parties"}))


Ssl = Literal["simsiam", "byol", "moco", "simclr"]


class SelfSupSettings(OwnOptimizers):
    """The settings of a self-supervised phase. ``None`` stands for the default of the preset or
    method; see ``make_plan``.
    """

    ssl: Ssl
    """The self-supervised loss."""
    rounds: PositiveInt = 40
    """The number of rounds."""
    batch_size: PositiveInt = Field(default=512, ge=2)
    """The number of rows in a batch."""
    projector: tuple[Width, ...] | None = None
    """The widths of the projector's layers. With ``[]`` there is no projector, and the loss uses
    the embeddings themselves (SS-VFL, Eq. 2). Default: from the method and the preset.
    """
    predictor: Width = 128
    """The width of the predictor's hidden layer (``simsiam``, ``byol``)."""
    anneal_predictor: bool | None = None
    """Whether the predictor's learning rate follows the optimizer's schedule (``simsiam``,
    ``byol``). If not, it stays at ``lr``. Default: true, with preset ``released`` false.
    """
    temperature: Temperature = 0.5
    """The number by which cosines are divided (``moco``, ``simclr``)."""
    queue: PositiveInt = 4096
    """``moco``: the number of keys in the queue. It must be less than the number of rows, or a
    row's own keys become negatives.
    """
    momentum: Probability | None = None
    """The share of its weights that the target encoder keeps in each step (``byol``, ``moco``).
    Default: from the method and the preset.
    """
    optimizer: UnjudgedOptimizer | None = None
    """The optimizer. Default: SGD with a cosine schedule and a learning rate that depends on the
    batch size.
    """
    augment: AugmentSettings = AugmentSettings()
    """The settings for the two views of a row."""


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
