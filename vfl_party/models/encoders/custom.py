"""The ``custom`` encoder: the user's own factory, named in the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from vfl_common.config.models import CustomSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import describe_failure
from vfl_party.models.encoders.spec import InputSpec


def build_custom(settings: CustomSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
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


def _import_factory(factory: str, where: str) -> Callable[..., Any]:
    module_name, _, name = factory.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        # The user's module may raise any exception.
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
