"""Settings of encoders, top models, optimizers and tasks, shared by the recipe and all methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from vfl_common.config.base import KindName, Section, gathered, spelt

# Widths and sizes: more is a typing mistake.
PositiveInt = Annotated[int, Field(gt=0, le=1_000_000)]
# Learning rates.
Rate = Annotated[float, Field(gt=0.0, le=1e3)]
# The norm to which gradients are clipped.
Norm = Annotated[float, Field(ge=1e-6, le=1e6)]
# Cosines are divided by it.
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


class TabularSettings(Section):
    """One embedding table a categorical column, concatenated with the numeric columns, then an
    MLP.
    """

    kind: Literal["tabular"]
    """An embedding for each categorical column beside the numeric columns, then fully connected
    layers.
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
    """The layers above the first block that FedHSSL averages: ``all``, or ``blocks``, without the
    linear layer, whose weights belong to positions of the image.
    """

    @model_validator(mode="after")
    def _something_shared(self) -> Self:
        if self.shared == "blocks" and len(self.channels) < 2:
            raise ValueError(
                'shared = "blocks" needs two channels or more: the first block is never shared'
            )
        return self


class ResNet18Settings(Section):
    """torchvision's ResNet-18 without weights from outside."""

    kind: Literal["resnet18"]
    """torchvision's ResNet-18 with random weights; for images."""
    small_images: bool = True
    """Whether the stem is a 3×3 convolution of stride 1 without pooling, for images below 64
    pixels.
    """


class CustomSettings(Section):
    """The user's own encoder: ``factory(input_spec, embedding_size, **options) ->
    torch.nn.Module``.
    """

    kind: Literal["custom"]
    """An encoder that a function of yours makes."""
    factory: Annotated[str, spelt(r"[\w.]+:\w+", "module:callable")]
    """The function: ``factory(input_spec, embedding_size, **options)`` returns a
    ``torch.nn.Module``.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""


class PluginSettings(Section):
    """The encoder of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/encoders/plugin.py``.
    """

    kind: KindName
    """The name of a plug-in's encoder."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The plug-in's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        return gathered(value, ("kind",))


# Ours; any other kind is a plug-in's.
ENCODERS = ("mlp", "tabular", "cnn", "resnet18", "custom")


def _whose(value: Any) -> str | None:
    """Returns which settings an encoder has: its kind, or ``plugin``; None if it names no kind."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return None if kind is None else kind if kind in ENCODERS else "plugin"


EncoderSettings = Annotated[
    Annotated[MlpSettings, Tag("mlp")]
    | Annotated[TabularSettings, Tag("tabular")]
    | Annotated[CnnSettings, Tag("cnn")]
    | Annotated[ResNet18Settings, Tag("resnet18")]
    | Annotated[CustomSettings, Tag("custom")]
    | Annotated[PluginSettings, Tag("plugin")],
    Discriminator(_whose),
]


class TopSettings(Section):
    """The active party's model on the combined embeddings: linear, or an MLP if ``hidden`` is not
    empty.
    """

    hidden: tuple[PositiveInt, ...] = ()
    """The widths of the top model's hidden layers; without any it is linear."""
    dropout: Probability = 0.0
    """The probability with which dropout sets a hidden number to zero in training."""


class ModelSettings(Section):
    """The split model: an encoder for each party, one rule of combination, one top model."""

    embedding_size: PositiveInt
    """The width of every party's embedding: the numbers that a party sends for each row."""
    combine: Literal["concat", "sum", "mean", "max"] = "concat"
    """How the active party combines embeddings: side by side, its own first (``concat``), or
    element by element.
    """
    encoder: EncoderSettings = MlpSettings()
    """The encoder of all parties that have none of their own."""
    top: TopSettings = TopSettings()
    """The active party's model on the combined embeddings."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The type in which forward and backward passes multiply. Tensors are stored and sent as
    float32.
    """


class OptimizerSettings(Section):
    """The optimizer that each party applies to its own parameters."""

    kind: Literal["sgd", "adam", "adagrad"] = "adam"
    """torch's optimizer; each party has one for its own parameters."""
    lr: Rate = 1e-3
    """The learning rate."""
    momentum: Probability = 0.0
    """The momentum; only for ``sgd``."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1e3)] = 0.0
    """Weight decay, which is added to the gradient."""
    schedule: Literal["constant", "cosine"] = "constant"
    """``cosine``: the learning rate falls to zero over the phase, changed after each epoch."""
    clip_norm: Norm | None = None
    """The largest L2 norm of a party's own gradient; a longer one is shortened. Default: no limit.
    """

    def model_post_init(self, _context: Any) -> None:
        if self.momentum and self.kind != "sgd":
            raise ValueError(f"momentum is for sgd; {self.kind} has none")


class TaskSettings(Section):
    """The kind of labels, and with it the loss and the metrics."""

    kind: Literal["binary", "multiclass", "regression"]
    """The kind of labels, and with it loss and metrics."""
    classes: Annotated[int, Field(ge=2)] | None = None
    """The number of classes; ``multiclass`` needs it, the others refuse it."""
    metrics: tuple[KindName, ...] = ()
    """Metrics of plug-ins, beside our own."""
    positive: bool | int | float | str | None = None
    """``binary``: the class whose probability a score is, and for which AUC and f1 are computed.
    Default: the second one in sorted order.
    """

    def model_post_init(self, _context: Any) -> None:
        if self.positive is not None and self.kind != "binary":
            raise ValueError("positive is for binary tasks; remove it")
        if (self.kind == "multiclass") != (self.classes is not None):
            raise ValueError("give 'classes' for multiclass tasks, and only for them")
        names = self.all_metrics
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"metrics: {twice} is computed already; remove it")

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """The metrics of ``evaluate``; it leaves out auc if the rows have only one class."""
        regression = self.kind == "regression"
        return (
            *(("loss", "rmse", "rmse_scaled") if regression else ("loss", "accuracy", "auc", "f1")),
            *self.metrics,
        )

    @property
    def outputs(self) -> int:
        """The width of the top model's output: logits, or one value."""
        return self.classes or 1


def class_text(value: object) -> str:
    """Returns a class as text, in which 1, 1.0 and "1" are one, and so are true and "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
