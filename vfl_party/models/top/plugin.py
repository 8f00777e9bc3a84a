"""Top models of plug-ins, which other packages export as entry points of ``vfl.tops``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from vfl_common.config.base import Section, parse
from vfl_common.config.models import TOPS, PluginTop, TopKinds
from vfl_party.base.plugins import PlugIns
from vfl_party.models.encoders.custom import module_of

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Top(Generic[S]):
    """The type that an entry point of ``vfl.tops`` names.

    Args:
        settings: The class of the settings in ``[model.top]``, without ``kind``.
        build: A function (settings, width of the combined embeddings, number of outputs) -> top
            model. The top model takes float32 [B, width] and returns logits or regression values,
            float32 [B, outputs].
    """

    settings: type[S]
    build: Callable[[S, int, int], nn.Module]


PLUGINS = PlugIns("vfl.tops", "top model", ours=TOPS)
_WHERE = "recipe: model.top"


def check_top(settings: TopKinds) -> None:
    """Raises InputError if no plug-in has this top model, or if its settings are invalid."""
    if isinstance(settings, PluginTop):
        _load(settings)


def build_plugin_top(settings: PluginTop, in_features: int, outputs: int) -> nn.Module:
    """Builds the top model of a plug-in.

    Raises InputError (MODEL_INVALID) if the plug-in fails or does not return an ``nn.Module``.
    """
    where = f"model.top.kind = {settings.kind!r}"
    export, parsed_settings = _load(settings)
    return module_of(
        lambda: export.build(parsed_settings, in_features, outputs), where, "the plug-in"
    )


def _load(settings: PluginTop) -> tuple[Top[Any], Section]:
    export = PLUGINS.check_type(PLUGINS.load(settings.kind, _WHERE), settings.kind, _WHERE, Top)
    parsed_settings: Section = parse(export.settings, settings.settings, _WHERE)
    return export, parsed_settings
