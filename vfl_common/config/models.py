"""Settings of encoders, top models and optimizers, shared by the recipe and all methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from vfl_common.config.base import KindName, OfPlugIn, Section, match_pattern

# Callers import these names from this module.
from vfl_common.config.task import TaskSettings as TaskSettings
from vfl_common.config.task import class_text as class_text

# A width or size. A larger number is a typing mistake.
PositiveInt = Annotated[int, Field(gt=0, le=1_000_000)]
# A learning rate.
Rate = Annotated[float, Field(gt=0.0, le=1e3)]
# The norm to which gradients are clipped.
Norm = Annotated[float, Field(ge=1e-6, le=1e6)]
# The number by which cosine similarities are divided.
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class MlpSettings(Section):
    """Fully connected layers with an activation after each hidden one."""

    kind: Literal["mlp"] = "mlp"
    """Fully connected layers on columns, or on the pixels of an image in a row."""
    hidden: tuple[PositiveInt, ...] = (128,)
    """The widths of the hidden layers."""
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    """The function after each hidden layer."""
    batch_norm: bool = False
    """Whether each hidden layer has batch normalisation."""
    dropout: Probability = 0.0
    """The probability with which dropout sets a hidden number to zero in training."""
    normed_output: bool = False
    """Whether batch normalisation and ReLU follow the last layer, as in FedHSSL's released code."""


class TabularSettings(Section):
    """One embedding table for each categorical column, concatenated with the numeric columns, then
    an MLP.
    """

    kind: Literal["tabular"]
    """An embedding for each categorical column, concatenated with the numeric columns, then fully
    connected layers.
    """
    hidden: tuple[PositiveInt, ...] = (128,)
    """The widths of the hidden layers."""
    category_size: PositiveInt = 8
    """The width of each category's embedding."""
    batch_norm: bool = False
    """Whether each hidden layer has batch normalisation."""
    dropout: Probability = 0.0
    """The probability with which dropout sets a hidden number to zero in training."""


class CnnSettings(Section):
    """Blocks of convolution 3x3, batch norm, ReLU and 2x2 max pooling, then one linear layer."""

    kind: Literal["cnn"]
    """Blocks of 3×3 convolution, batch normalisation, ReLU and 2×2 max pooling, then a linear
    layer; for images.
    """
    channels: tuple[PositiveInt, ...] = (16, 32)
    """The channels of each block."""
    batch_norm: bool = True
    """Whether each block has batch normalisation."""
    shared: Literal["all", "blocks"] = "all"
    """The layers above the first block that FedHSSL averages: ``all`` averages all of them;
    ``blocks`` leaves out the linear layer, whose weights belong to positions of the image.
    """

    @model_validator(mode="after")
    def _something_shared(self) -> Self:
        if self.shared == "blocks" and len(self.channels) < 2:
            raise ValueError(
                'shared = "blocks" needs at least 2 blocks, because the first block is never '
                "shared. "
                "Add a number to channels."
            )
        return self


class Cnn0Settings(Section):
    """CNN0 of FedOnce (Wu et al. 2022, Fig. 4a), then fully connected layers."""

    kind: Literal["cnn0"]
    """FedOnce's CNN0, for images of 6 pixels or more: 3×3 convolutions of 32 and 64 channels
    without padding, ReLU after each, 2×2 max pooling, dropout, then fully connected layers.
    """
    hidden: tuple[PositiveInt, ...] = (128,)
    """The widths of the hidden layers after the convolutions."""
    dropout: Probability = 0.25
    """The probability with which dropout sets a number to zero after the pooling, in training."""


class Cnn1Settings(Section):
    """CNN1 of FedOnce (Wu et al. 2022, Fig. 4b), then fully connected layers."""

    kind: Literal["cnn1"]
    """FedOnce's CNN1, for images of 14 pixels or more: convolutions of 8×8, 16 channels, and of
    4×4, 32 channels, each of stride 2 with ReLU and a 2×2 max pooling of stride 1 as in the
    released code, then fully connected layers. No layer depends on the other rows of a batch.
    """
    hidden: tuple[PositiveInt, ...] = ()
    """The widths of the hidden layers after the convolutions."""


# The networks of torchvision, which share the class NetworkSettings.
NETWORKS = ("resnet18", "resnet50", "mobilenet_v2", "vgg13")


class NetworkSettings(Section):
    """A network of torchvision without pretrained weights."""

    kind: Literal["resnet18", "resnet50", "mobilenet_v2", "vgg13"]
    """torchvision's ResNet-18, ResNet-50, MobileNetV2, or VGG-13 with batch normalisation, with
    random weights; for images.
    """
    small_images: bool = True
    """Whether the network is adapted to images smaller than 64 pixels, as is usual for CIFAR.
    ResNet: the stem is a 3×3 convolution of stride 1 without pooling. MobileNetV2: the first two
    strides of 2 are 1. VGG: the mean over positions and one linear layer replace the last three
    layers.
    """
    last_layer: bool = True
    """Whether a last linear layer computes the embedding. Without that layer, the embedding is the
    output of the layer before it, and ``embedding_size`` must be its width: 512 (``resnet18``,
    ``vgg13``), 2,048 (``resnet50``), 1,280 (``mobilenet_v2``), or 4,096 (``vgg13`` for large
    images).
    """


class RawSettings(Section):
    """No encoder: the active party's inputs go into the top model as they are."""

    kind: Literal["raw"]
    """No encoder: the active party's own columns, or pixels, are its embedding (FedOnce's x¹). Its
    ``embedding_size`` is their number. Passive parties would send their columns: they are refused.
    """


class CustomSettings(Section):
    """The user's own encoder: ``factory(input_spec, embedding_size, **options) ->
    torch.nn.Module``.
    """

    kind: Literal["custom"]
    """An encoder that your own function creates."""
    factory: Annotated[str, match_pattern(r"[\w.]+:\w+", "module:callable")]
    """The function: ``factory(input_spec, embedding_size, **options)`` returns a
    ``torch.nn.Module``.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""


class PluginSettings(OfPlugIn):
    """The encoder of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/external.py``.
    """

    kind: KindName
    """The name of a plug-in's encoder."""


# The built-in encoders. Any other kind is a plug-in's.
ENCODERS = ("mlp", "tabular", "cnn", "cnn0", "cnn1", *NETWORKS, "raw", "custom")


def _tag_of_encoder(value: Any) -> str | None:
    """Returns the tag of an encoder's settings class: its kind, ``network`` or ``plugin``; None if
    the settings have no kind.
    """
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if kind in NETWORKS:
        return "network"
    return None if kind is None else kind if kind in ENCODERS else "plugin"


EncoderSettings = Annotated[
    Annotated[MlpSettings, Tag("mlp")]
    | Annotated[TabularSettings, Tag("tabular")]
    | Annotated[CnnSettings, Tag("cnn")]
    | Annotated[Cnn0Settings, Tag("cnn0")]
    | Annotated[Cnn1Settings, Tag("cnn1")]
    | Annotated[NetworkSettings, Tag("network")]
    | Annotated[RawSettings, Tag("raw")]
    | Annotated[CustomSettings, Tag("custom")]
    | Annotated[PluginSettings, Tag("plugin")],
    Discriminator(_tag_of_encoder),
]


class TopSettings(Section):
    """The active party's model on the combined embeddings: linear, or an MLP if ``hidden`` is not
    empty.
    """

    kind: Literal["mlp"] = "mlp"
    """A linear layer, or fully connected layers with ReLU."""
    hidden: tuple[PositiveInt, ...] = ()
    """The widths of the top model's hidden layers; without any it is linear."""
    dropout: Probability = 0.0
    """The probability with which dropout sets a hidden number to zero in training."""


class CustomTop(Section):
    """The user's own top model: ``factory(in_features, outputs, **options) -> torch.nn.Module``."""

    kind: Literal["custom"]
    """A top model that your own function creates."""
    factory: Annotated[str, match_pattern(r"[\w.]+:\w+", "module:callable")]
    """The function: ``factory(in_features, outputs, **options)`` returns a ``torch.nn.Module``. The
    active party imports it.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""


class PluginTop(OfPlugIn):
    """The top model of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/external.py``.
    """

    kind: KindName
    """The name of a plug-in's top model."""


class GbdtTop(Section):
    """Gradient-boosted trees on the concatenated embeddings, which the phase ``head`` grows."""

    kind: Literal["gbdt"]
    """Gradient-boosted trees, grown by the phase ``head``. Unless the recipe or the party file
    gives the active party an encoder, its own columns go into the trees as they are (``raw``).
    """
    library: Literal["sklearn", "lightgbm"] = "sklearn"
    """The library that grows the trees: scikit-learn's ``HistGradientBoosting``, or LightGBM, which
    needs the extra ``gbdt``.
    """
    trees: Annotated[int, Field(ge=1, le=10_000)] = 200
    """The maximum number of boosting rounds. A round grows one tree, or one tree for each class of
    a multiclass task.
    """
    lr: Rate = 0.05
    """The learning rate."""
    leaves: Annotated[int, Field(ge=2, le=65_536)] = 31
    """The maximum number of leaves of a tree."""
    min_rows: PositiveInt = 20
    """The minimum number of training rows in a leaf."""
    l2: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """The L2 regularisation of the leaf values."""
    early_stopping: PositiveInt | None = None
    """Ends after this number of rounds without a lower loss on the validation rows, and keeps the
    rounds up to the best. Passive parties then also send their embeddings of the validation rows.
    Default: off.
    """


# The built-in top models. Any other kind is a plug-in's.
TOPS = ("mlp", "custom", "gbdt")


def _tag_of_top(value: Any) -> str:
    """Returns the tag of a top model's settings class: its kind or ``plugin``; ``mlp`` if the
    settings have no kind.
    """
    kind = value.get("kind", "mlp") if isinstance(value, dict) else getattr(value, "kind", "mlp")
    return kind if kind in TOPS else "plugin"


TopKinds = Annotated[
    Annotated[TopSettings, Tag("mlp")]
    | Annotated[CustomTop, Tag("custom")]
    | Annotated[GbdtTop, Tag("gbdt")]
    | Annotated[PluginTop, Tag("plugin")],
    Discriminator(_tag_of_top),
]


# The built-in rules of combination. Any other name is a plug-in's.
COMBINATIONS = ("concat", "sum", "mean", "max", "attention")


class PluginCombination(OfPlugIn):
    """The combination of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/external.py``.
    """

    kind: KindName
    """The name of a plug-in's combination."""

    def __str__(self) -> str:
        return self.kind


def _expand_combination(value: Any) -> Any:
    """Turns the name of a plug-in's combination into its table."""
    return {"kind": value} if isinstance(value, str) and value not in COMBINATIONS else value


def _tag_of_combination(value: Any) -> str:
    return "plugin" if isinstance(value, dict | PluginCombination) else "ours"


Combine = Annotated[
    Annotated[Literal["concat", "sum", "mean", "max", "attention"], Tag("ours")]
    | Annotated[PluginCombination, Tag("plugin")],
    Discriminator(_tag_of_combination),
    BeforeValidator(_expand_combination),
]


class ModelSettings(Section):
    """The split model: an encoder for each party, one rule of combination, one top model."""

    embedding_size: PositiveInt
    """The width of each party's embedding: the numbers that a party sends for each row."""
    combine: Combine = "concat"
    """How the active party combines embeddings: concatenated, its own first (``concat``); element
    by element (``sum``, ``mean``, ``max``); as a sum with learned weights (``attention``); or with
    a plug-in, which is given as a name or as a table with its settings.
    """
    encoder: EncoderSettings = MlpSettings()
    """The encoder of all parties without an encoder of their own."""
    top: TopKinds = TopSettings()
    """The active party's model on the combined embeddings."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The dtype of matrix multiplications in forward and backward passes. Tensors are stored and
    sent as float32.
    """


class OptimizerSettings(Section):
    """The optimizer that each party applies to its own parameters."""

    kind: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    """torch's optimizer; each party has one for its own parameters."""
    lr: Rate = 1e-3
    """The learning rate."""
    momentum: Probability = 0.0
    """The momentum; only for ``sgd``."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1e3)] = 0.0
    """The weight decay. It is added to the gradient; ``adamw`` decouples it from the gradient."""
    schedule: Literal["constant", "cosine", "step", "plateau"] = "constant"
    """How the learning rate changes after an epoch. ``cosine``: it falls to zero over the phase.
    ``step``: it is multiplied by ``factor`` after each ``step_epochs`` epochs. ``plateau``: it is
    multiplied by ``factor`` after ``plateau_patience`` validations without a better value.
    """
    warmup_epochs: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The number of epochs in which the learning rate rises linearly to ``lr`` before the schedule
    begins.
    """
    step_epochs: PositiveInt | None = None
    """The number of epochs between two reductions of the learning rate; only for ``step``, which
    needs it.
    """
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The number by which ``step`` and ``plateau`` multiply the learning rate."""
    plateau_patience: PositiveInt = 3
    """The number of validations without a better value of early stopping's metric; only for
    ``plateau``.
    """
    clip_norm: Norm | None = None
    """The maximum L2 norm of a party's own gradient. A larger gradient is scaled down. Default: no
    limit.
    """

    def model_post_init(self, _context: Any) -> None:
        if self.momentum and self.kind != "sgd":
            raise ValueError(f"momentum is for sgd (got {self.kind}). Remove it.")
        schedules = {
            "step_epochs": ("step",),
            "factor": ("step", "plateau"),
            "plateau_patience": ("plateau",),
        }
        for key, allowed_schedules in schedules.items():
            if key in self.model_fields_set and self.schedule not in allowed_schedules:
                wanted = " or ".join(f'"{schedule}"' for schedule in allowed_schedules)
                raise ValueError(f"{key} is for schedule = {wanted}. Remove it, or set that.")
        if self.schedule == "step" and self.step_epochs is None:
            raise ValueError('schedule = "step" needs step_epochs. Add it.')


def _refuse_plateau(value: OptimizerSettings) -> OptimizerSettings:
    if value.schedule == "plateau":
        raise ValueError(
            'schedule = "plateau" is for splitnn, in which all parties learn the validation '
            'metric. Use "step" or "cosine".'
        )
    return value


# The optimizer of a method whose parties do not learn the validation metric.
UnjudgedOptimizer = Annotated[OptimizerSettings, AfterValidator(_refuse_plateau)]
