"""The ``custom`` encoder: the user's own factory, named in the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from vfl_common.config.models import CustomSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import where_it_failed
from vfl_party.models.encoders.spec import InputSpec


def build_custom(settings: CustomSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the encoder by ``factory(spec, embedding_size, **options)``.

    Raises as ``build_module``.
    """
    return build_module(settings.factory, settings.options, _where(settings), spec, embedding_size)


def asks_for_codes(settings: CustomSettings) -> bool:
    """Returns whether the factory has ``takes_codes = True``. Raises InputError (MODEL_INVALID) if
    it cannot be imported.
    """
    return bool(getattr(_import_factory(settings.factory, _where(settings)), "takes_codes", False))


def build_module(factory: str, options: Mapping[str, Any], where: str, *args: Any) -> nn.Module:
    """Returns the module that the user's factory, ``module:callable``, makes of ``args`` and
    ``options``.

    ``where``: the key that names it. Raises InputError (MODEL_INVALID) if the factory cannot be
    imported, fails, or gives no ``torch.nn.Module``.
    """
    make = _import_factory(factory, where)
    return module_of(lambda: make(*args, **options), where, "the factory")


def module_of(make: Callable[[], object], where: str, whose: str) -> nn.Module:
    """Returns the module that external code makes. ``where``: the key that names the code;
    ``whose``: as in ``the factory``. Raises InputError (MODEL_INVALID) if it fails, or gives none.
    """
    try:
        model = make()
    except Exception as error:
        # It may raise anything.
        raise _invalid(f"{where}: {whose} failed {where_it_failed(error)}. Correct it.") from error
    if not isinstance(model, nn.Module):
        raise _invalid(
            f"{where}: {whose} must return a torch.nn.Module (got {type(model).__name__}). Correct "
            "it."
        )
    return model


def _import_factory(factory: str, where: str) -> Callable[..., Any]:
    module_name, _, name = factory.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        # The user's module may raise anything.
        raise _invalid(
            f"{where}: cannot import {module_name} ({_first_line(error)}). Put its folder on "
            "PYTHONPATH."
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _invalid(message: str) -> InputError:
    return InputError(Code.MODEL_INVALID, message)
