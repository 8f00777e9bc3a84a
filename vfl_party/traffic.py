"""What a phase is going to exchange, known before anything runs: what a method states for a forecast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vfl_common.bundle import BundleSpec, StepKey
from vfl_common.errors import Code, InputError
from vfl_party.context import Party
from vfl_party.exchange import NOTHING


@dataclass(frozen=True)
class Exchange:
    """One step: each of ``asking`` sends ``up`` to ``peer``, which computes and answers each with ``down``."""

    step: StepKey
    asking: tuple[str, ...]
    peer: str
    up: BundleSpec
    down: BundleSpec = NOTHING


@dataclass(frozen=True)
class Traffic:
    """All exchanges of a phase, in order. ``may_end_early``: the data decide how many rounds there are, these at most.

    Exchanges of one step key happen at the same time, those of different ones one after the other.
    """

    exchanges: Iterable[Exchange] = ()
    may_end_early: bool = False


def with_active(party: Party, step: StepKey, up: BundleSpec, down: BundleSpec = NOTHING) -> Exchange:
    """Every passive party asks the active party."""
    recipe = party.recipe
    return Exchange(step, tuple(each.name for each in recipe.passives), recipe.active.name, up, down)


def with_server(party: Party, step: StepKey, weights: BundleSpec) -> Exchange:
    """Every party sends weights to the aggregation server, and gets their mean."""
    recipe = party.recipe
    return Exchange(step, tuple(each.name for each in recipe.parties), recipe.server, weights, weights)


def need_data(party: Party, phase: str, what: str) -> None:
    """Raises InputError where only the number of rows is known, and the sizes of ``what`` follow from the columns."""
    if party.features is None:
        text = f"phase {phase}: how large {what} are follows from the parties' columns"
        raise InputError(Code.CONFIG_INVALID, f"{text}: leave out --rows, and give a recipe or party file with data")


def silent(_party: Party, _phase: str, _settings: object) -> Traffic:
    """Of a phase in which every party is alone."""
    return Traffic()
