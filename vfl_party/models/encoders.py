"""Builds an encoder from the recipe's settings and checks the shape of its output."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor, nn

from vfl_common.config.models import (
    Cnn0Settings,
    Cnn1Settings,
    CnnSettings,
    CustomSettings,
    EncoderSettings,
    GbdtTop,
    MlpSettings,
    NetworkSettings,
    PluginSettings,
    RawSettings,
    TabularSettings,
)
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.models.external import (
    asks_for_codes,
    build_custom_encoder,
    build_plugin_encoder,
    plugin_asks_for_codes,
    require_float32,
    run_on_two_rows,
)
from vfl_party.models.layers import InputSpec, build_layers, build_mlp, mark_top
from vfl_party.models.networks import build_network


def build_encoder(settings: EncoderSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds an encoder on the CPU.

    Call it as ``encoder(x)`` or, if the spec has cardinalities, as ``encoder(x, categories)``. x is
    float32 [B, *spec.shape], categories are int64 [B, K], and the output is float32 [B,
    embedding_size]. The weights come from torch's CPU generator, so build the encoder inside
    ``seed_torch(...)``. Raises InputError (MODEL_INVALID) if this kind of encoder does not support
    rows of this spec.
    """
    if not isinstance(settings, CustomSettings | PluginSettings):
        _check_rows(settings.kind, spec)
    match settings:
        case MlpSettings():
            return build_mlp(settings, spec, embedding_size)
        case TabularSettings():
            return build_tabular(settings, spec, embedding_size)
        case CnnSettings():
            return build_cnn(settings, spec, embedding_size)
        case Cnn0Settings() | Cnn1Settings():
            return build_fedonce(settings, spec, embedding_size)
        case NetworkSettings():
            return build_network(settings, spec, embedding_size)
        case RawSettings():
            return nn.Flatten()
        case CustomSettings():
            return build_custom_encoder(settings, spec, embedding_size)
        case PluginSettings():
            return build_plugin_encoder(settings, spec, embedding_size)


def width_of(recipe: Recipe, party: str, settings: EncoderSettings, spec: InputSpec) -> int:
    """Returns the width of a party's embedding.

    This is the width that the recipe sets. If a model of trees takes the party's raw columns and
    the recipe sets no width for the party, it is the number of columns.
    """
    place = recipe.party(party)
    has_width = place is not None and place.embedding_size is not None
    if (
        isinstance(recipe.model.top, GbdtTop)
        and isinstance(settings, RawSettings)
        and not has_width
    ):
        return math.prod(spec.shape)
    return recipe.embedding_size(party)


def needs_codes(settings: EncoderSettings) -> bool:
    """Returns whether an encoder takes categorical columns as codes instead of one-hot columns.

    Raises InputError if a custom encoder cannot be imported.
    """
    match settings:
        case CustomSettings():
            return asks_for_codes(settings)
        case PluginSettings():
            return plugin_asks_for_codes(settings)
    return isinstance(settings, TabularSettings)


def build_checked_encoder(
    settings: EncoderSettings, spec: InputSpec, embedding_size: int, *, party: str
) -> nn.Module:
    """Builds an encoder and checks its output for two rows of zeros in evaluation mode.

    The check changes neither torch's generator nor the batch norm statistics. Raises InputError
    (MODEL_INVALID) if the encoder fails or does not return float32 [2, embedding_size].
    """
    encoder = build_encoder(settings, spec, embedding_size)
    inputs = [torch.zeros(2, *spec.shape)]
    if spec.cardinalities:
        inputs.append(torch.zeros(2, len(spec.cardinalities), dtype=torch.int64))
    shapes = " and ".join(str(list(x.shape)) for x in inputs)
    subject, fix = f"the encoder of {party}", "the encoder"
    output = run_on_two_rows(encoder, *inputs, subject=subject, rows=f"shape {shapes}", fix=fix)
    out = require_float32(output, subject=subject, fix=fix)
    if out.dim() == 2 and len(out) == 2 and out.shape[1] != embedding_size:
        raise _invalid(
            f"the encoder of {party}: must return embedding_size numbers per row, {embedding_size} "
            f"(got {out.shape[1]}). Set embedding_size to the encoder's width."
        )
    if out.shape != (2, embedding_size):
        raise _invalid(
            f"the encoder of {party}: must return a tensor of shape [2, {embedding_size}] for two "
            f"rows (got {list(out.shape)}). Correct the encoder, or embedding_size."
        )
    return encoder


def _check_rows(kind: str, spec: InputSpec) -> None:
    if spec.cardinalities and kind != "tabular":
        raise _invalid(
            f"model.encoder: kind {kind!r} does not support categorical columns. Set kind = "
            "'tabular'."
        )
    if kind == "tabular" and len(spec.shape) != 1:
        raise _invalid(
            "model.encoder: kind 'tabular' requires columns (got rows of shape "
            f"{list(spec.shape)}). Set kind = 'cnn'."
        )
    if kind not in ("mlp", "tabular", "raw") and len(spec.shape) != 3:
        raise _invalid(
            f"model.encoder: kind {kind!r} requires images of shape [channels, height, width] (got "
            f"rows of shape {list(spec.shape)}). Set kind = 'mlp' or 'tabular'."
        )


def _invalid(message: str) -> InputError:
    return InputError(Code.MODEL_INVALID, message)


def build_cnn(settings: CnnSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds blocks of 3x3 convolution, batch norm, ReLU and 2x2 pooling, and a last linear layer.

    A block does not pool an image that is less than two pixels high or wide. The encoder takes
    [B, C, H, W] and returns [B, embedding_size]. Its top consists of the blocks after the first one
    and, with ``shared = "all"``, of the last linear layer.
    """
    channels, height, width = spec.shape
    modules: list[nn.Module] = []
    first_block = 0
    for out_channels in settings.channels:
        modules.append(
            nn.Conv2d(channels, out_channels, 3, padding=1, bias=not settings.batch_norm)
        )
        if settings.batch_norm:
            modules.append(nn.BatchNorm2d(out_channels))
        modules.append(nn.ReLU())
        if min(height, width) >= 2:
            modules.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        channels = out_channels
        first_block = first_block or len(modules)
    encoder = nn.Sequential(
        *modules, nn.Flatten(), nn.Linear(channels * height * width, embedding_size)
    )
    last = len(encoder) if settings.shared == "all" else len(modules)
    return mark_top(encoder, *(str(layer) for layer in range(first_block, last)))


# The minimum height and width of an image, so that one pixel remains after the last pooling layer.
MIN_SIDE = {"cnn0": 6, "cnn1": 14}


def build_fedonce(
    settings: Cnn0Settings | Cnn1Settings, spec: InputSpec, embedding_size: int
) -> nn.Module:
    """Builds convolutions and then linear layers with ReLU between them.

    The encoder takes [B, C, H, W] and returns [B, embedding_size]. The linear layers are its top.
    Raises InputError if the images are too small.
    """
    channels, height, width = spec.shape
    min_side = MIN_SIDE[settings.kind]
    if min(height, width) < min_side:
        raise InputError(
            Code.MODEL_INVALID,
            f"model.encoder: kind {settings.kind!r} requires images of at least {min_side} x "
            f"{min_side} pixels (got {width} x {height}). Provide larger images, or set kind = "
            "'cnn'.",
        )
    blocks = (
        _cnn0(channels, settings.dropout) if isinstance(settings, Cnn0Settings) else _cnn1(channels)
    )
    convolutions = nn.Sequential(*blocks, nn.Flatten())
    with torch.no_grad():
        features = convolutions.eval()(torch.zeros(1, *spec.shape)).shape[1]
    encoder = nn.Sequential(
        *convolutions.train(), *build_layers(features, settings.hidden, embedding_size)
    )
    return mark_top(encoder, *(str(place) for place in range(len(convolutions), len(encoder))))


def _cnn0(channels: int, dropout: float) -> list[nn.Module]:
    pooled = [nn.MaxPool2d(2), *([nn.Dropout(dropout)] if dropout else [])]
    return [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), *pooled]


def _cnn1(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
    ]


class TabularEncoder(nn.Module):
    """An MLP on numeric columns and on embeddings of categorical columns.

    One table has the embeddings of all columns, so that a batch needs one lookup instead of K.
    """

    # [K], the row of ``table`` where the embeddings of each column begin.
    offsets: Tensor

    def __init__(self, settings: TabularSettings, spec: InputSpec, embedding_size: int) -> None:
        super().__init__()
        (numeric,), cardinalities = spec.shape, spec.cardinalities
        self.table = (
            nn.Embedding(sum(cardinalities), settings.category_size) if cardinalities else None
        )
        offsets = [0, *accumulate(cardinalities)][:-1]
        self.register_buffer("offsets", torch.tensor(offsets, dtype=torch.int64), persistent=False)
        self.mlp = nn.Sequential(
            *build_layers(
                numeric + len(cardinalities) * settings.category_size,
                settings.hidden,
                embedding_size,
                batch_norm=settings.batch_norm,
                dropout=settings.dropout,
            )
        )

    def forward(self, x_BF: Tensor, categories_BK: Tensor | None = None) -> Tensor:
        """Embeds a batch.

        Args:
            x_BF: The numeric columns, float32 [B, F]. F may be 0.
            categories_BK: The codes, int64 [B, K]. Column k is in [0, cardinalities[k]).
        """
        if self.table is not None and categories_BK is not None:
            x_BF = torch.cat([x_BF, self.table(categories_BK + self.offsets).flatten(1)], dim=1)
        out: Tensor = self.mlp(x_BF)
        return out


def build_tabular(settings: TabularSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the ``tabular`` encoder. Its top is the last layer.

    The encoder takes x [B, F] and, if the spec has K cardinalities, categories int64 [B, K]. It
    returns [B, embedding_size].
    """
    encoder = TabularEncoder(settings, spec, embedding_size)
    return mark_top(encoder, f"mlp.{len(encoder.mlp) - 1}")
