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
    hidden: tuple[PositiveInt, ...] = (128,)
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    batch_norm: bool = False
    dropout: Probability = 0.0


class TabularSettings(Section):
    """One embedding table a categorical column, concatenated with the numeric columns, then an
    MLP.
    """

    kind: Literal["tabular"]
    hidden: tuple[PositiveInt, ...] = (128,)
    # Width of each category's embedding.
    category_size: PositiveInt = 8
    batch_norm: bool = False
    dropout: Probability = 0.0


class CnnSettings(Section):
    """Blocks of convolution 3x3, batch norm, ReLU and 2x2 max pooling, then one linear layer."""

    kind: Literal["cnn"]
    channels: tuple[PositiveInt, ...] = (16, 32)
    batch_norm: bool = True
    # The layers above the first block that FedHSSL aggregates: all, or the blocks without the
    # linear layer, whose weights belong to positions of the image.
    shared: Literal["all", "blocks"] = "all"

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
    # A 3x3 stem with stride 1 and no pooling, for images below 64 pixels.
    small_images: bool = True


class CustomSettings(Section):
    """The user's own encoder: ``factory(input_spec, embedding_size, **options) ->
    torch.nn.Module``.
    """

    kind: Literal["custom"]
    factory: Annotated[str, spelt(r"[\w.]+:\w+", "module:callable")]
    options: dict[str, Any] = Field(default_factory=dict)


class PluginSettings(Section):
    """The encoder of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/encoders/plugin.py``.
    """

    kind: KindName
    settings: dict[str, Any] = Field(default_factory=dict)

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
    dropout: Probability = 0.0


class ModelSettings(Section):
    """The split model: an encoder for each party, one rule of combination, one top model.

    ``precision``: the type in which forward and backward passes multiply; tensors are stored and
    sent as float32.
    """

    embedding_size: PositiveInt
    combine: Literal["concat", "sum", "mean", "max"] = "concat"
    encoder: EncoderSettings = MlpSettings()
    top: TopSettings = TopSettings()
    precision: Literal["float32", "bfloat16"] = "float32"


class OptimizerSettings(Section):
    """The optimizer that each party applies to its own parameters."""

    kind: Literal["sgd", "adam", "adagrad"] = "adam"
    lr: Rate = 1e-3
    # SGD only.
    momentum: Probability = 0.0
    weight_decay: Annotated[float, Field(ge=0.0, le=1e3)] = 0.0
    # Cosine: to zero over the phase, stepped by epoch.
    schedule: Literal["constant", "cosine"] = "constant"
    # Clips each party's own gradient before its step.
    clip_norm: Norm | None = None

    def model_post_init(self, _context: Any) -> None:
        if self.momentum and self.kind != "sgd":
            raise ValueError(f"momentum is for sgd; {self.kind} has none")


class TaskSettings(Section):
    """The kind of labels, and with it the loss and the metrics.

    ``positive``: the class of a binary task that scores, AUC and f1 are of; None: the second one in
    sorted order.
    """

    kind: Literal["binary", "multiclass", "regression"]
    # Multiclass: how many.
    classes: Annotated[int, Field(ge=2)] | None = None
    # Of plug-ins, beside our own.
    metrics: tuple[KindName, ...] = ()
    positive: bool | int | float | str | None = None

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
