"""The ``custom`` encoder: the user's own factory, named in the recipe."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from vfl_common.config.models import CustomSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import where_it_failed
from vfl_party.models.encoders.spec import InputSpec


def build_custom(settings: CustomSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the encoder by ``factory(spec, embedding_size, **options)``.

    Raises InputError (MODEL_INVALID) if the factory cannot be imported, fails, or gives no
    ``torch.nn.Module``.
    """
    where = f"model.encoder.factory = {settings.factory!r}"
    module_name, _, name = settings.factory.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        # The user's module may raise anything.
        raise _invalid(
            f"{where}: cannot import {module_name} ({_first_line(error)}); is it on PYTHONPATH?"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise _invalid(f"{where}: {module_name} has no function or class {name!r}")
    try:
        model = factory(spec, embedding_size, **settings.options)
    except Exception as error:
        # The factory, too, may raise anything.
        raise _invalid(f"{where}: the factory failed {where_it_failed(error)}") from error
    if not isinstance(model, nn.Module):
        raise _invalid(
            f"{where}: the factory gives a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _invalid(message: str) -> InputError:
    return InputError(Code.MODEL_INVALID, message)
