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
        settings: the keys of ``[model.encoder]`` besides ``kind``.
        build: (settings, the rows that the encoder will see, the embedding's size) -> the encoder.
            It takes float32 [B, *spec.shape], categorical columns as one 0 or 1 a category, and
            gives float32 [B, embedding_size]. The submodules that FedHSSL aggregates are named by
            the encoder's attribute ``top_layers``.
        takes_codes: the encoder takes categorical columns as codes, int64 [B, C], as its second
            argument, and ``spec.cardinalities`` says how many codes each column has.
    """

    settings: type[S]
    build: Callable[[S, InputSpec, int], nn.Module]
    takes_codes: bool = False


PLUGINS = PlugIns("vfl.encoders", "encoder", ours=ENCODERS)


def check_encoder(settings: EncoderSettings, where: str) -> None:
    """Raises InputError that names ``where`` if no plug-in has such an encoder, or if its settings
    are wrong.
    """
    if isinstance(settings, PluginSettings):
        _load(settings, where)


def build_plugin(settings: PluginSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the encoder of a plug-in. Raises InputError (MODEL_INVALID) if that fails, or gives no
    nn.Module.
    """
    where = f"model.encoder.kind = {settings.kind!r}"
    export, own = _load(settings, where)
    return module_of(lambda: export.build(own, spec, embedding_size), where, "the plug-in")


def plugin_asks_for_codes(settings: PluginSettings) -> bool:
    """Returns the plug-in's ``takes_codes``. Raises InputError as ``check_encoder``."""
    export, _ = _load(settings, f"model.encoder.kind = {settings.kind!r}")
    return export.takes_codes


def _load(settings: PluginSettings, where: str) -> tuple[Encoder[Any], Section]:
    export = PLUGINS.check_type(PLUGINS.load(settings.kind, where), settings.kind, where, Encoder)
    own: Section = parse(export.settings, settings.settings, where)
    return export, own
