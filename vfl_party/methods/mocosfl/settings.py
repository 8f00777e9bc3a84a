"""The recipe's settings for MocoSFL, and their check before anything runs. The defaults are from
the paper's appendices A.1 and A.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Probability, Temperature, UnjudgedOptimizer
from vfl_common.config.models import PositiveInt as Width
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.methods.mocosfl.resist import ResistSettings
from vfl_party.models.halves import Bottleneck
from vfl_party.selfsup.settings import AugmentSettings

_MAX_PIXELS = 1 << 26
# The maximum number of bytes of all keys.
_MAX_KEY_BYTES = 64 << 30
# The number of rows of all parties in a step, and between two averages, at which the released code
# aims.
_ROWS_A_STEP, _ROWS_AN_AVERAGE = 100, 1000
# The minimum area of a crop in the released code, and the share of blurred images in both papers.
_MIN_CROP, _BLURRED = 0.08, 0.5
# The learning rates of the tail: from appendix A.1, and from A.4 for a bottom model that is not
# trained.
_RATE, _FROZEN_RATE = 0.06, 0.001


class BottleneckSettings(Section):
    """Settings of TAResSFL's bottleneck at the cut layer. C4S2 means ``channels = 4, stride =
    2``.
    """

    channels: Annotated[int, Field(gt=0, le=4096)] = 4
    """The number of channels at the cut layer."""
    stride: Annotated[int, Field(ge=1, le=8)] = 2
    """The stride that reduces height and width at the cut layer."""

    def __str__(self) -> str:
        return f"C{self.channels}S{self.stride}"


class MocoSFLSettings(Section):
    """A step is one batch of ``batch_size`` rows at each passive party. A round ends with an
    average of the bottom models.

    A party with fewer rows than the largest party repeats its rows within an epoch. The loss is one
    mean over the rows of all K parties, and each party gets only the gradient for its rows. So
    averaged bottom models move 1/K as far as in one process with the same learning rate. A rate
    that is K times as large in ``bottom_optimizer`` compensates for that. The released code also
    has a separate rate for clients (``c_lr``).
    """

    epochs: PositiveInt = 200
    """The number of epochs. An epoch has as many steps as the party with the most rows has full
    batches.
    """
    batch_size: PositiveInt = 20
    """The number of rows in a batch at each passive party."""
    averages_per_epoch: PositiveInt = 1
    """The number of times in an epoch that the server averages the bottom models. Each average ends
    a round.
    """
    sample: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The share of the passive parties that take part in an epoch. New parties are drawn for each
    epoch, at least one.
    """
    auto_adjust: bool = False
    """Whether ``batch_size``, ``averages_per_epoch`` and ``sample``, unless they are set, are
    derived from the number of passive parties, as in the released code.
    """
    image: tuple[Width, Width, Width] = (3, 32, 32)
    """The channels, height and width of a row. The active party, which has no images, needs
    them.
    """
    cut: Width = 3
    """The number of convolutions in the bottom model (1 in MocoSFL-1, 3 in MocoSFL-3)."""
    bottleneck: BottleneckSettings | None = None
    """A narrow layer at the cut layer (TAResSFL's bottleneck). Default: none."""
    queue: Annotated[int, Field(gt=0, le=10_000_000)] = 6000
    """The number of keys of all parties together. It should be less than the number of rows, or a
    row's own keys become negatives.
    """
    shared_memory: bool = True
    """Whether all keys are negatives for every party's rows. Otherwise only the keys of the same
    party are, which has an equal part of ``queue`` (MocoSFL, Fig. 12).
    """
    temperature: Temperature = 0.1
    """The temperature, by which cosine similarities are divided."""
    momentum: Probability = 0.99
    """The share of their weights that the moving averages of bottom models and tail keep in each
    step.
    """
    width: Annotated[int, Field(gt=0, le=16_384)] = 1024
    """The width of the two layers above the features, which are only used in pretraining."""
    frozen: bool = False
    """Whether the bottom models stay unchanged, without gradients and averages (TAResSFL's
    transfer).
    """
    resist: ResistSettings | None = None
    """Settings for training resistance to model inversion, at a single party. Default: none."""
    optimizer: UnjudgedOptimizer | None = None
    """The optimizer of bottom models and tail. Default: SGD with learning rate 0.06 (0.001 with
    ``frozen``), momentum 0.9, weight decay 5e-4 and a cosine schedule.
    """
    bottom_optimizer: UnjudgedOptimizer | None = None
    """The optimizer of the bottom models. Default: ``optimizer``."""
    augment: AugmentSettings = AugmentSettings()
    """How a view of a row is made. Default: half of all images are blurred; with ``preset =
    "released"``, crops cover at least 0.08 of an image.
    """
    query: Literal["raw", "view"] | None = None
    """The input of the bottom model: the row as it is (``raw``), or a view of it. Its moving
    average always gets another view. Default: ``raw`` with ``preset = "paper"``, else ``view``.
    """

    def model_post_init(self, _context: Any) -> None:
        if self.frozen and "averages_per_epoch" in self.model_fields_set:
            raise ValueError(
                "frozen = true leaves the bottom models unchanged. Remove averages_per_epoch."
            )
        if self.frozen and (self.sample < 1.0 or self.auto_adjust):
            raise ValueError(
                "frozen = true leaves the bottom models unchanged. Remove sample and auto_adjust."
            )
        if self.frozen and self.bottom_optimizer is not None:
            raise ValueError(
                "frozen = true leaves the bottom models unchanged. Remove bottom_optimizer."
            )
        if math.prod(self.image) > _MAX_PIXELS:
            raise ValueError(
                f"image must have at most {_MAX_PIXELS:,} numbers (got "
                f"{math.prod(self.image):,}). Correct image."
            )
        if 4 * self.queue * self.width > _MAX_KEY_BYTES:
            raise ValueError(
                f"queue = {self.queue:,} keys of width = {self.width:,} need more than "
                f"{_MAX_KEY_BYTES >> 30} GiB. Lower queue or width."
            )
        if self.resist is not None and (self.frozen or self.batch_size < 2):
            raise ValueError(
                "resist trains the bottom model on batches of at least 2 rows. Remove frozen, or "
                "increase batch_size."
            )

    def adjust(self, parties: int) -> MocoSFLSettings:
        """Returns the settings for this number of passive parties. ``auto_adjust`` follows the
        released code, which has about 100 rows in a step and averages after about 1,000 rows, but
        at least twice in an epoch (appendix A.1).
        """
        if not self.auto_adjust or not parties:
            return self
        batch = max(1, _ROWS_A_STEP // parties)
        adjusted = {
            "batch_size": batch,
            "averages_per_epoch": max(2, _ROWS_AN_AVERAGE // (batch * parties)),
            "sample": 1 / max(1, parties // _ROWS_A_STEP),
        }
        written = self.model_fields_set
        return self.model_copy(update={k: v for k, v in adjusted.items() if k not in written})

    def views(self, preset: Literal["paper", "released"]) -> tuple[AugmentSettings, bool]:
        """Returns how a view is made, and whether the bottom model gets rows without
        augmentation.
        """
        defaults: dict[str, Any] = {"blur": _BLURRED}
        if preset == "released":
            defaults["crop_scale"] = (_MIN_CROP, self.augment.crop_scale[1])
        written = self.augment.model_fields_set
        augment = self.augment.model_copy(
            update={key: value for key, value in defaults.items() if key not in written}
        )
        query = self.query or ("raw" if preset == "paper" else "view")
        return augment, query == "raw"

    @property
    def neck(self) -> Bottleneck | None:
        """The bottleneck at the cut layer; None without one."""
        return (
            Bottleneck(self.bottleneck.channels, self.bottleneck.stride)
            if self.bottleneck is not None
            else None
        )

    @property
    def rounds(self) -> int:
        """The number of rounds of the phase."""
        return self.epochs * self.averages_per_epoch

    @property
    def of_bottoms(self) -> OptimizerSettings:
        """The optimizer of the bottom models: ``bottom_optimizer``, or ``tail_optimizer``."""
        return self.bottom_optimizer if self.bottom_optimizer is not None else self.tail_optimizer

    @property
    def tail_optimizer(self) -> OptimizerSettings:
        """The optimizer of the tail: ``optimizer``, or its default."""
        if self.optimizer is not None:
            return self.optimizer
        rate = _FROZEN_RATE if self.frozen else _RATE
        return OptimizerSettings(
            kind="sgd", lr=rate, momentum=0.9, weight_decay=5e-4, schedule="cosine"
        )


KIND = "mocosfl"
# The settings of the network that must be the same in all phases.
_NETWORK_KEYS = ("image", "cut", "bottleneck", "width")


def find_first_phase(recipe: Recipe) -> str | None:
    """Returns the name of the recipe's first phase of MocoSFL; None if it has none."""
    return next((phase.name for phase in recipe.phases if phase.kind == KIND), None)


def check_phase(recipe: Recipe, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if the network of a phase differs from the network of another phase or
    party.
    """
    for party in recipe.parties:
        if party.encoder is not None and party.encoder != recipe.model.encoder:
            raise other_encoder_error(f"recipe: parties.{party.name}.encoder")
    for where, other_settings in _yield_earlier_phases(recipe, phase):
        for key in _NETWORK_KEYS:
            other_value, value = getattr(other_settings, key), getattr(settings, key)
            if other_value != value:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase}: {key} must be the same in all phases of mocosfl, "
                    f"which train one network (got {value}, and {other_value} in {where}). Set "
                    "the same value.",
                )


def other_encoder_error(where: str) -> InputError:
    """Returns the error for a party that has its own encoder."""
    return InputError(
        Code.CONFIG_INVALID,
        f"{where}: mocosfl averages the bottom models, so all parties need the same network. "
        "Remove this encoder, and set model.encoder.",
    )


def _yield_earlier_phases(recipe: Recipe, phase: str) -> Iterator[tuple[str, MocoSFLSettings]]:
    """Yields the place and the settings of each MocoSFL phase before ``phase``, starting with the
    phases of the earlier run.
    """
    for earlier in recipe.start.phases if recipe.start is not None else ():
        if earlier.kind == KIND:
            yield "start.phases", MocoSFLSettings.model_validate(earlier.settings)
    for earlier in recipe.phases:
        if earlier.name == phase:
            return
        if earlier.kind == KIND:
            yield f"phase {earlier.name}", MocoSFLSettings.model_validate(earlier.settings)
