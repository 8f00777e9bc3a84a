"""The phases that a recipe can name: one folder a kind, its two sides side by side. A method imports no other."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from vfl_common.config.base import Section, parse
from vfl_common.config.recipe import PhaseSettings, Recipe
from vfl_common.errors import Code, InputError
from vfl_common.stages import MOST_ROUNDS
from vfl_party.context import MakeEncoder, Party
from vfl_party.models import TwoTowers
from vfl_party.phase import Phase
from vfl_party.privacy.gaussian import GaussianNoise
from vfl_party.privacy.plan import Plan, PrivatePhase, make_plan
from vfl_party.traffic import Traffic


@dataclass(frozen=True)
class Method:
    """What a method's folder exports as ``METHOD``: its settings, and a side for each role.

    ``encoder``: the encoder that the phase trains and hands on to those after it, where that is not a single one.
    ``noise``: σ of the noise on what a passive party sends for evaluation and prediction, where the phase asks for any.
    ``private``: (the phase's name, its settings, the recipe, the number of training rows) -> what the phase is to spend
    where its settings have ``dp``. ``trains``: whether rows leave a trace in the models. ``kept``: whether what it
    learns is in the party's models at all; where it is not, it is the recipe's only phase. ``traffic``: what the phase
    is going to exchange, for a forecast; the party may lack features and models, and the function exchanges nothing.
    ``encodes``: all its forward passes are ``Party.encode`` and ``Party.outputs``, which know of the recipe's precision
    and of a party's several GPUs.
    """

    settings: type[Section]
    active: Callable[[Party, str, Section], Phase]  # party, the phase's name, its settings
    passive: Callable[[Party, str, Section], Phase]
    encoder: Callable[[Section, MakeEncoder], nn.Module] | None = None
    noise: Callable[[Section], float] | None = None
    private: Callable[[str, Section, Recipe, int], PrivatePhase | None] | None = None
    trains: bool = True
    kept: bool = True
    traffic: Callable[[Party, str, Section], Traffic] | None = None
    encodes: bool = False


def kinds() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_method(kind: str) -> Method:
    """Raises InputError naming the nearest kind."""
    if kind not in kinds():
        near = difflib.get_close_matches(kind, kinds(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(kinds())}"
        raise InputError(Code.CONFIG_INVALID, f"recipe: phases: there is no phase of kind {kind!r}; {hint}")
    method = importlib.import_module(f"{__name__}.{kind}").METHOD
    assert isinstance(method, Method)  # noqa: S101 - our own folders
    return method


def parse_settings(phase: PhaseSettings) -> Section:
    """The phase's settings as its method's model. Raises InputError."""
    return parse(load_method(phase.kind).settings, phase.settings, f"recipe: phases: {phase.name}")


def handed_on(recipe: Recipe, make: MakeEncoder) -> nn.Module:
    """The encoder that the recipe's phases work on: as the first method says that wants it otherwise than single.

    The phases of the run that this one starts from count too. Raises InputError.
    """
    start = recipe.start
    encoder: nn.Module | None = None
    for phase in (*(start.phases if start is not None else ()), *recipe.phases):
        method = load_method(phase.kind)
        if method.encoder is not None:
            encoder = method.encoder(parse_settings(phase), make)
            break
    if start is None or start.tower is None:
        return encoder or make("encoder")
    if not isinstance(encoder, TwoTowers):
        text = f"recipe: start.tower = {start.tower!r}: the phases of {start.run} do not hand on two encoders"
        raise InputError(Code.CONFIG_INVALID, f"{text}; remove it, or give start.phases as that run has them")
    if encoder.rule == "concat":
        text = f"recipe: start.tower = {start.tower!r}: with keep = 'concat' an encoder gives half of the embedding"
        raise InputError(Code.CONFIG_INVALID, f"{text}; remove it, or pretrain with keep = 'mean'")
    return encoder.cross if start.tower == "cross" else encoder.local


def sent_noise(recipe: Recipe) -> GaussianNoise:
    """What a passive party adds to its embeddings for evaluation and prediction: the largest that a phase asks for."""
    asked = [0.0]
    for phase in recipe.phases:
        method = load_method(phase.kind)
        if method.noise is not None:
            asked.append(method.noise(parse_settings(phase)))
    return GaussianNoise(max(asked))


def nothing_kept(recipe: Recipe) -> str | None:
    """The first phase whose model ends with it, by name; None where there is none."""
    return next((phase.name for phase in recipe.phases if not load_method(phase.kind).kept), None)


def evaluated(recipe: Recipe) -> set[str]:
    """The splits of whose rows some phase reports metrics, where they have rows."""
    return {split for phase in recipe.phases for split in getattr(parse_settings(phase), "splits", ())}


def privacy_plan(recipe: Recipe, rows: int) -> Plan | None:
    """What the phases with ``dp`` are to spend over so many training rows, the same at every party; None without any.

    Raises InputError where the phases do not fit together.
    """
    private, without = [], []
    for phase in recipe.phases:
        method = load_method(phase.kind)
        found = method.private(phase.name, parse_settings(phase), recipe, rows) if method.private is not None else None
        if found is not None:
            private.append(found)
        elif method.trains:
            without.append(phase.name)
    if recipe.start is not None:
        without.insert(0, f"run {recipe.start.run}")
    return make_plan(private, rows, without)


def with_own_passes(recipe: Recipe) -> PhaseSettings | None:
    """The first phase that has forward passes of its own, in float32 and in one process; None where there is none."""
    return next((phase for phase in recipe.phases if not load_method(phase.kind).encodes), None)


def check_together(recipe: Recipe, rows: int) -> None:
    """Raises InputError where the phases do not fit together, over so many training rows."""
    privacy_plan(recipe, rows)
    left = nothing_kept(recipe)
    if left is not None and (len(recipe.phases) > 1 or recipe.start is not None):
        text = f"recipe: phases: {left} trains a model of its own that no other phase sees"
        raise InputError(Code.CONFIG_INVALID, f"{text}; make it the only phase, and remove start")
    own = with_own_passes(recipe)
    if own is not None and recipe.model.precision != "float32":
        text = f"recipe: phases: {own.name}: a phase of kind {own.kind!r} computes in float32 alone"
        raise InputError(Code.CONFIG_INVALID, f'{text}; remove model.precision = "{recipe.model.precision}"')


def build_phases(recipe: Recipe, party: Party) -> list[Phase]:
    """This party's side of every phase of the recipe."""
    role = "active" if party.name == recipe.active.name else "passive"
    phases = []
    check_together(recipe, len(party.rows("train")))
    for phase in recipe.phases:
        side: Callable[[Party, str, Section], Phase] = getattr(load_method(phase.kind), role)
        phases.append(side(party, phase.name, parse_settings(phase)))
    rounds = sum(phase.rounds for phase in phases)
    if rounds > MOST_ROUNDS:
        text = f"recipe: phases: {rounds:,} rounds in all, and the labels of checkpoints count to {MOST_ROUNDS:,}"
        raise InputError(Code.CONFIG_INVALID, f"{text}; train for fewer, or let a round be longer (validate_every)")
    return phases
