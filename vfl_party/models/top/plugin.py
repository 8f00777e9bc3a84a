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
        settings: the keys of ``[model.top]`` besides ``kind``.
        build: (settings, width of the combined embeddings, number of outputs) -> the top model. It
            takes float32 [B, width] and gives float32 [B, outputs]: logits, or the value of a
            regression.
    """

    settings: type[S]
    build: Callable[[S, int, int], nn.Module]


PLUGINS = PlugIns("vfl.tops", "top model", ours=TOPS)
_WHERE = "recipe: model.top"


def check_top(settings: TopKinds) -> None:
    """Raises InputError if no plug-in has such a top model, or if its settings are wrong."""
    if isinstance(settings, PluginTop):
        _load(settings)


def build_plugin_top(settings: PluginTop, in_features: int, outputs: int) -> nn.Module:
    """Builds the top model of a plug-in. Raises InputError (MODEL_INVALID) if that fails, or gives
    no nn.Module.
    """
    where = f"model.top.kind = {settings.kind!r}"
    export, own = _load(settings)
    return module_of(lambda: export.build(own, in_features, outputs), where, "the plug-in")


def _load(settings: PluginTop) -> tuple[Top[Any], Section]:
    export = PLUGINS.check_type(PLUGINS.load(settings.kind, _WHERE), settings.kind, _WHERE, Top)
    own: Section = parse(export.settings, settings.settings, _WHERE)
    return export, own
