"""Encoders of plug-ins, which other packages export as entry points of ``vfl.encoders``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from vfl_common.config.base import Section, parse
from vfl_common.config.models import ENCODERS, EncoderSettings, PluginSettings
from vfl_party.base.plugins import PlugIns
from vfl_party.models.encoders.custom import module_of
from vfl_party.models.encoders.spec import InputSpec

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Encoder(Generic[S]):
    """The type that an entry point of ``vfl.encoders`` names.

    Args:
        settings: The class of the settings in ``[model.encoder]``, without ``kind``.
        build: A function (settings, spec, embedding_size) -> encoder. The encoder takes float32
            [B, *spec.shape], in which categorical columns are one-hot, and returns float32 [B,
            embedding_size]. Its attribute ``top_layers`` names the submodules that FedHSSL
            aggregates.
        takes_codes: Whether the encoder takes categorical columns as codes, int64 [B, C], in a
            second argument. ``spec.cardinalities`` then has the number of codes in each column.
    """

    settings: type[S]
    build: Callable[[S, InputSpec, int], nn.Module]
    takes_codes: bool = False


PLUGINS = PlugIns("vfl.encoders", "encoder", ours=ENCODERS)


def check_encoder(settings: EncoderSettings, where: str) -> None:
    """Raises InputError if no installed plug-in has this encoder, or if its settings are invalid.

    ``where``: The place in the recipe that the error message names.
    """
    if isinstance(settings, PluginSettings):
        _load(settings, where)


def build_plugin(settings: PluginSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the encoder of a plug-in.

    Raises InputError (MODEL_INVALID) if the plug-in fails or does not return an ``nn.Module``.
    """
    where = f"model.encoder.kind = {settings.kind!r}"
    export, parsed_settings = _load(settings, where)
    return module_of(
        lambda: export.build(parsed_settings, spec, embedding_size), where, "the plug-in"
    )


def plugin_asks_for_codes(settings: PluginSettings) -> bool:
    """Returns the plug-in's ``takes_codes``. Raises the errors of ``check_encoder``."""
    export, _ = _load(settings, f"model.encoder.kind = {settings.kind!r}")
    return export.takes_codes


def _load(settings: PluginSettings, where: str) -> tuple[Encoder[Any], Section]:
    export = PLUGINS.check_type(PLUGINS.load(settings.kind, where), settings.kind, where, Encoder)
    parsed_settings: Section = parse(export.settings, settings.settings, where)
    return export, parsed_settings
