"""Method: what a method's folder, or a plug-in, exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from vfl_common.config.base import Section
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.context import MakeEncoder, Party
from vfl_party.declared import Traffic
from vfl_party.phase import Phase
from vfl_party.privacy.plan import PrivatePhase

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Method(Generic[S]):
    """What a method's folder, or an entry point of ``vfl.methods``, exports: its settings, and a side for each role.

    ``encoder``: the encoder that the phase trains and hands on to those after it, if that is not a single one.
    ``part``: (that encoder, a name) -> one of its parts, for a run that starts with that alone; raises ValueError with
    what is wrong and what to do.
    ``noise``: σ of the noise on what a passive party sends for evaluation and prediction, where the phase asks for any.
    ``private``: (the phase's name, its settings, the recipe, the number of training rows) -> what the phase is to spend
    where its settings have ``dp``. ``trains``: whether rows leave a trace in the models. ``kept``: whether what it
    learns is in the party's models at all; where it is not, it is the recipe's only phase. ``traffic``: what the phase
    is going to exchange, for a forecast; the party may lack features and models, and the function exchanges nothing.
    ``encodes``: all its forward passes are ``Party.encode`` and ``Party.outputs``, which know of the recipe's precision
    and of a party's several GPUs.
    """

    settings: type[S]
    active: Callable[[Party, str, S], Phase]  # party, the phase's name, its settings
    passive: Callable[[Party, str, S], Phase]
    encoder: Callable[[S, MakeEncoder], nn.Module] | None = None
    part: Callable[[nn.Module, str], nn.Module] | None = None
    noise: Callable[[S], float] | None = None
    private: Callable[[str, S, Recipe, int], PrivatePhase | None] | None = None
    trains: bool = True
    kept: bool = True
    traffic: Callable[[Party, str, S], Traffic] | None = None
    encodes: bool = False


def silent(_party: Party, _phase: str, _settings: Section) -> Traffic:
    """The traffic of a phase in which every party is alone."""
    return Traffic()


def need_data(party: Party, phase: str, what: str) -> None:
    """Raises InputError if only the number of rows is known, and the sizes of ``what`` follow from the columns."""
    if party.features is None:
        text = f"phase {phase}: how large {what} are follows from the parties' columns"
        raise InputError(Code.CONFIG_INVALID, f"{text}: leave out --rows, and give a recipe or party file with data")
