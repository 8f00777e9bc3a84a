"""Builds an encoder from the recipe's settings and checks the shape of its output."""

from __future__ import annotations

import math

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
from vfl_party.base.dtypes import get_real_dtype
from vfl_party.base.plugins import describe_failure
from vfl_party.models.encoders.cnn import build_cnn
from vfl_party.models.encoders.custom import asks_for_codes, build_custom
from vfl_party.models.encoders.fedonce import build_fedonce
from vfl_party.models.encoders.mlp import build_mlp
from vfl_party.models.encoders.network import build_network
from vfl_party.models.encoders.plugin import build_plugin, plugin_asks_for_codes
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.encoders.tabular import build_tabular


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
            return build_custom(settings, spec, embedding_size)
        case PluginSettings():
            return build_plugin(settings, spec, embedding_size)


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
    mode = encoder.training
    encoder.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            out = encoder(*inputs)
    except Exception as error:
        shapes = " and ".join(str(list(x.shape)) for x in inputs)
        raise _invalid(
            f"the encoder of {party}: failed on two rows of shape {shapes} "
            f"{describe_failure(error)}. Correct the encoder."
        ) from error
    encoder.train(mode)
    if not isinstance(out, Tensor) or out.dtype != get_real_dtype():
        got = out.dtype if isinstance(out, Tensor) else type(out).__name__
        raise _invalid(
            f"the encoder of {party}: must return a float32 tensor (got {got}). Correct the "
            "encoder."
        )
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
