"""Loads and checks models that users write: factories named in the recipe, and encoders, top models
and combinations of plug-ins, which other packages export as entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vfl_common.config.base import Section, parse
from vfl_common.config.models import (
    COMBINATIONS,
    ENCODERS,
    TOPS,
    Combine,
    CustomSettings,
    EncoderSettings,
    PluginCombination,
    PluginSettings,
    PluginTop,
    TopKinds,
)
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import get_real_dtype
from vfl_party.base.plugins import PlugIns, describe_failure
from vfl_party.models.layers import InputSpec

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


@dataclass(frozen=True)
class Combination(Generic[S]):
    """The type that an entry point of ``vfl.combinations`` names.

    Args:
        settings: The class of the settings in ``model.combine``, without ``kind``.
        build: A function (settings, width D of an embedding, number K of embeddings) -> a module.
            The module takes float32 [B, K, D] with the active party's embedding first and the
            others in the recipe's order. It returns float32 [B, width] of any width. With
            ``late_policy = "skip"`` K is smaller if a party is absent.
    """

    settings: type[S]
    build: Callable[[S, int, int], nn.Module]


ENCODER_PLUGINS = PlugIns("vfl.encoders", "encoder", ours=ENCODERS)
TOP_PLUGINS = PlugIns("vfl.tops", "top model", ours=TOPS)
COMBINATION_PLUGINS = PlugIns("vfl.combinations", "combination", ours=COMBINATIONS)
_TOP, _COMBINE = "recipe: model.top", "recipe: model.combine"


class NoSettings(Section):
    """The empty settings of a plug-in that is a bare function."""


class _Function(nn.Module):
    """Wraps a function as a module without weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, z_BKD: Tensor) -> Tensor:
        return self._function(z_BKD)


class _PluginChoice(Protocol):
    """The recipe's choice of a plug-in."""

    @property
    def kind(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...


def load_plugin(
    plugins: PlugIns,
    choice: _PluginChoice,
    where: str,
    wanted: type,
    wrap: Callable[[Any], object] | None = None,
) -> tuple[Any, Section]:
    """Returns the plug-in that the recipe names, of type ``wanted``, and its parsed settings.

    ``wrap`` converts a bare function. Raises InputError if no plug-in has this name, or if its type
    or its settings are invalid.
    """
    loaded = plugins.load(choice.kind, where)
    if wrap is not None and callable(loaded) and not isinstance(loaded, type):
        loaded = wrap(loaded)
    export: Any = plugins.check_type(loaded, choice.kind, where, wanted)
    settings: Section = parse(export.settings, choice.settings, where)
    return export, settings


def check_encoder(settings: EncoderSettings, where: str) -> None:
    """Raises InputError if no installed plug-in has this encoder, or if its settings are invalid.

    ``where``: The place in the recipe that the error message names.
    """
    if isinstance(settings, PluginSettings):
        load_plugin(ENCODER_PLUGINS, settings, where, Encoder)


def check_top(settings: TopKinds) -> None:
    """Raises InputError if no plug-in has this top model, or if its settings are invalid."""
    if isinstance(settings, PluginTop):
        load_plugin(TOP_PLUGINS, settings, _TOP, Top)


def check_combination(settings: Combine) -> None:
    """Raises InputError if no plug-in has this combination, or if its settings are invalid."""
    if isinstance(settings, PluginCombination):
        _load_combination(settings)


def build_plugin_encoder(
    settings: PluginSettings, spec: InputSpec, embedding_size: int
) -> nn.Module:
    """Builds the encoder of a plug-in. Raises the errors of ``module_of``."""
    export, parsed = _load_encoder(settings)
    where = f"model.encoder.kind = {settings.kind!r}"
    return module_of(lambda: export.build(parsed, spec, embedding_size), where, "the plug-in")


def build_plugin_top(settings: PluginTop, in_features: int, outputs: int) -> nn.Module:
    """Builds the top model of a plug-in. Raises the errors of ``module_of``."""
    export, parsed = load_plugin(TOP_PLUGINS, settings, _TOP, Top)
    where = f"model.top.kind = {settings.kind!r}"
    return module_of(lambda: export.build(parsed, in_features, outputs), where, "the plug-in")


def build_combination(
    settings: PluginCombination, width: int, embeddings: int
) -> tuple[nn.Module, int]:
    """Builds the combination of a plug-in. Returns the module and the width of its output.

    Raises InputError (MODEL_INVALID) if the plug-in fails, or if the module fails on two rows of
    zeros or returns another shape or dtype.
    """
    where = f"{_COMBINE} = {settings.kind!r}"
    export, parsed = _load_combination(settings)
    combination = module_of(lambda: export.build(parsed, width, embeddings), where, "the plug-in")
    inputs, rows = torch.zeros(2, embeddings, width), f"{embeddings} embeddings of {width} numbers"
    out = run_on_two_rows(combination, inputs, subject=where, rows=rows, fix="the plug-in")
    if not isinstance(out, Tensor) or out.dtype != get_real_dtype() or out.shape[:-1] != (2,):
        raise _invalid(
            f"{where}: must return float32 of shape [2, width] for two rows (got "
            f"{describe_output(out)}). Correct the plug-in."
        )
    return combination, out.shape[1]


def plugin_asks_for_codes(settings: PluginSettings) -> bool:
    """Returns the plug-in's ``takes_codes``. Raises the errors of ``check_encoder``."""
    export, _ = _load_encoder(settings)
    return bool(export.takes_codes)


def _load_encoder(settings: PluginSettings) -> tuple[Any, Section]:
    where = f"model.encoder.kind = {settings.kind!r}"
    return load_plugin(ENCODER_PLUGINS, settings, where, Encoder)


def _load_combination(settings: PluginCombination) -> tuple[Any, Section]:
    def wrap(function: Callable[[Tensor], Tensor]) -> Combination[NoSettings]:
        return Combination(NoSettings, lambda *_: _Function(function))

    return load_plugin(COMBINATION_PLUGINS, settings, _COMBINE, Combination, wrap)


# -- factories of the user's own code, and checks of what they and plug-ins return


def build_custom_encoder(
    settings: CustomSettings, spec: InputSpec, embedding_size: int
) -> nn.Module:
    """Calls the user's ``factory(spec, embedding_size, **options)`` and returns the encoder.

    Raises the errors of ``build_module``.
    """
    return build_module(settings.factory, settings.options, _where(settings), spec, embedding_size)


def asks_for_codes(settings: CustomSettings) -> bool:
    """Returns whether the user's factory has the attribute ``takes_codes = True``.

    Raises InputError (MODEL_INVALID) if the factory cannot be imported.
    """
    return bool(getattr(_import_factory(settings.factory, _where(settings)), "takes_codes", False))


def build_module(factory: str, options: Mapping[str, Any], where: str, *args: Any) -> nn.Module:
    """Calls the user's factory, ``module:callable``, with ``args`` and ``options``.

    ``where``: The recipe key that names the factory. Raises InputError (MODEL_INVALID) if the
    factory cannot be imported, fails, or does not return a ``torch.nn.Module``.
    """
    make = _import_factory(factory, where)
    return module_of(lambda: make(*args, **options), where, "the factory")


def module_of(make: Callable[[], object], where: str, subject: str) -> nn.Module:
    """Calls the user's or a plug-in's code and returns the module that the code builds.

    ``where`` is the recipe key that names the code. ``subject`` names it in an error message, as in
    ``the factory``. Raises InputError (MODEL_INVALID) if the code fails or does not return a
    ``torch.nn.Module``.
    """
    try:
        model = make()
    except Exception as error:
        # External code may raise any exception.
        raise _invalid(
            f"{where}: {subject} failed {describe_failure(error)}. Correct it."
        ) from error
    if not isinstance(model, nn.Module):
        raise _invalid(
            f"{where}: {subject} must return a torch.nn.Module (got {type(model).__name__}). "
            "Correct it."
        )
    return model


def run_on_two_rows(model: nn.Module, *inputs: Tensor, subject: str, rows: str, fix: str) -> object:
    """Returns the output of a model for two rows of zeros, in evaluation mode.

    This changes neither torch's generator nor the batch norm statistics. ``subject``, ``rows`` and
    ``fix`` name the model, its input and what to correct, for the InputError (MODEL_INVALID) if the
    model fails.
    """
    mode = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            out: object = model(*inputs)
    except Exception as error:
        raise _invalid(
            f"{subject}: failed on two rows of {rows} {describe_failure(error)}. Correct {fix}."
        ) from error
    model.train(mode)
    return out


def require_float32(out: object, *, subject: str, fix: str) -> Tensor:
    """Returns a model's output. Raises InputError (MODEL_INVALID) if it is not a float32 tensor."""
    if not isinstance(out, Tensor) or out.dtype != get_real_dtype():
        got = out.dtype if isinstance(out, Tensor) else type(out).__name__
        raise _invalid(f"{subject}: must return a float32 tensor (got {got}). Correct {fix}.")
    return out


def describe_output(out: object) -> str:
    """Returns the dtype and the shape of a tensor, or the type of another object."""
    if isinstance(out, Tensor):
        return f"{out.dtype} of shape {list(out.shape)}"
    return type(out).__name__


def _import_factory(factory: str, where: str) -> Callable[..., Any]:
    module_name, _, name = factory.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        # The user's module may raise any exception.
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _invalid(
            f"{where}: cannot import {module_name} ({first_line}). Put its folder on PYTHONPATH."
        ) from error
    target = getattr(module, name, None)
    if not callable(target):
        raise _invalid(
            f"{where}: {module_name} has no function or class {name!r}. Correct the name."
        )
    make: Callable[..., Any] = target
    return make


def _where(settings: CustomSettings) -> str:
    return f"model.encoder.factory = {settings.factory!r}"


def _invalid(message: str) -> InputError:
    return InputError(Code.MODEL_INVALID, message)
