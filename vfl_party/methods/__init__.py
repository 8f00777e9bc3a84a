"""Methods, the phases that a recipe can name: one folder a kind, with both sides. A method imports
no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import PydanticSerializationError
from torch import nn

from vfl_common.config.base import Section, parse
from vfl_common.config.recipe import Recipe, Spelling
from vfl_common.config.recipe_tables import PhaseSettings
from vfl_common.config.stands_alone import must_be_alone, must_not_start
from vfl_common.errors import Code, InputError
from vfl_common.stages import MOST_ROUNDS
from vfl_party.base.phase import Phase
from vfl_party.base.plugins import Registry, blaming
from vfl_party.models.metrics import load_metric
from vfl_party.outbound import codecs, transforms
from vfl_party.outbound.chains import check_asked, check_wire
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method, Scores
from vfl_party.privacy.plan import PrivacyPlan, make_plan

REGISTRY = Registry("vfl.methods", "phase of kind", sys.modules[__name__], "METHOD")


def kinds() -> list[str]:
    """Returns all kinds that a recipe can name."""
    return REGISTRY.names()


def load_method(kind: str) -> Method[Any]:
    """Returns the method of a kind. Raises InputError, naming the nearest kind, if there is
    none.
    """
    found = REGISTRY.load(kind, "recipe: phases")
    if not isinstance(found, Method):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: the plug-in {kind!r} is no vfl_party.phases.method.Method",
        )
    return found


def parse_settings(phase: PhaseSettings) -> Section:
    """Returns the phase's settings as its method's model. Raises InputError."""
    settings: Section = parse(
        load_method(phase.kind).settings, phase.settings, f"recipe: phases: {phase.name}"
    )
    return settings


@blaming()
def handed_on(recipe: Recipe, make: MakeEncoder) -> nn.Module:
    """Returns the encoder that all phases share: built by the first method that has a builder, else
    a single encoder.

    The phases of the run that this one starts from come first. Raises InputError.
    """
    start = recipe.start
    encoder: nn.Module | None = None
    method: Method[Any] | None = None
    for phase in (*(start.phases if start is not None else ()), *recipe.phases):
        method = load_method(phase.kind)
        if method.encoder is not None:
            encoder = method.encoder(parse_settings(phase), make)
        if encoder is not None:
            break
    if start is None or start.tower is None:
        return encoder or make("encoder")
    where = f"recipe: start.tower = {start.tower!r}"
    if encoder is None or method is None or method.part is None:
        text = f"{where}: the phases of {start.run} do not hand on two encoders"
        raise InputError(
            Code.CONFIG_INVALID, f"{text}; remove it, or give start.phases as that run has them"
        )
    try:
        return method.part(encoder, start.tower)
    except ValueError as error:
        raise InputError(Code.CONFIG_INVALID, f"{where}: {error}") from None


@blaming()
def upper_of(recipe: Recipe, seed: int) -> dict[str, nn.Module]:
    """Returns what the phases of the active party share of a cut network: the first method's.

    ``seed``: the active party's own, see ``Party.own_seed``. Raises InputError.
    """
    start = recipe.start
    for phase in (*(start.phases if start is not None else ()), *recipe.phases):
        method = load_method(phase.kind)
        if method.upper is not None:
            found: dict[str, nn.Module] = method.upper(parse_settings(phase), recipe, seed)
            return found
    return {}


@blaming()
def own_of(recipe: Recipe) -> dict[str, nn.Module]:
    """Returns the model of the recipe's method that is no encoder and no top, if it has one."""
    found: dict[str, nn.Module] = {}
    for phase in recipe.phases:
        method = load_method(phase.kind)
        found |= method.own() if method.own is not None else {}
    return found


@blaming()
def own_scores(party: Party, phase: str) -> Scores | None:
    """Returns the party's side of the joint prediction, if the recipe's method has its own. Raises
    InputError.
    """
    for each in party.recipe.phases:
        method = load_method(each.kind)
        if method.scores is not None:
            found: Scores = method.scores(party, phase, parse_settings(each))
            return found
    return None


@blaming()
def sent_noise(recipe: Recipe) -> float:
    """Returns σ of the noise on a passive party's embeddings in evaluation and prediction: the
    phases' largest.
    """
    asked = [0.0]
    for phase in recipe.phases:
        method = load_method(phase.kind)
        if method.noise is not None:
            asked.append(method.noise(parse_settings(phase)))
    return max(asked)


@blaming()
def protected(recipe: Recipe) -> str:
    """Says how the phases' encoders protect the embeddings that they give, for evaluation and
    prediction.
    """
    found = []
    for phase in (*(recipe.start.phases if recipe.start is not None else ()), *recipe.phases):
        method = load_method(phase.kind)
        found.append(method.protects(parse_settings(phase)) if method.protects is not None else "")
    return next((each for each in found if each), "")


@blaming()
def late_policy(recipe: Recipe) -> LatePolicy:
    """Returns what stands in for a party in the first phase that goes on without one; ``wait`` if
    none does.
    """
    for phase in recipe.phases:
        method = load_method(phase.kind)
        found = method.late(parse_settings(phase)) if method.late is not None else "wait"
        if found != "wait":
            return found
    return "wait"


@blaming()
def in_flight(recipe: Recipe) -> int:
    """Returns how many exchanges of one passive party may be under way, in any phase."""
    methods = [(load_method(phase.kind), phase) for phase in recipe.phases]
    return max(
        method.in_flight(parse_settings(phase)) if method.in_flight else 1
        for method, phase in methods
    )


def oldest_protocol(recipe: Recipe) -> int:
    """Returns the oldest protocol with which all phases can be run."""
    return max(load_method(phase.kind).protocol for phase in recipe.phases)


def filled(recipe: Recipe) -> Spelling:
    """Returns the recipe for a comparison with that of another release: with the defaults of
    methods and filters.
    """
    phases = [
        {
            "settings": _filled(load_method(phase.kind).settings, phase.settings),
            "transforms": [
                {
                    "settings": _filled(
                        transforms.load(use.kind, f"recipe: phases: {phase.name}").settings,
                        use.settings,
                    )
                }
                for use in phase.transforms
            ],
        }
        for phase in recipe.phases
    ]
    wire = [
        {"settings": _filled(codecs.settings_of(table.codec, "recipe: wire"), table.settings)}
        for table in recipe.wire
    ]
    return recipe.spelling({"phases": phases, "wire": wire})


def _filled(model: type[Section] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the defaults of their model; nothing if JSON lacks their types, as a
    plug-in's may be.
    """
    try:
        return parse(model, settings, "recipe").model_dump(mode="json") if model is not None else {}
    except PydanticSerializationError:
        return {}


def nothing_kept(recipe: Recipe) -> str | None:
    """Returns the name of the first phase whose model ends with it; None if there is none."""
    return next((phase.name for phase in recipe.phases if not load_method(phase.kind).kept), None)


def evaluated(recipe: Recipe) -> set[str]:
    """Returns the splits for whose rows, if there are any, some phase reports metrics."""
    return {
        split for phase in recipe.phases for split in getattr(parse_settings(phase), "splits", ())
    }


@blaming()
def privacy_plan(recipe: Recipe, rows: int) -> PrivacyPlan | None:
    """Returns the budget of the phases with ``dp`` over ``rows`` training rows, equal at every
    party; None without any.

    Raises InputError if the phases do not fit together.
    """
    private, without = [], []
    for phase in recipe.phases:
        method = load_method(phase.kind)
        found = (
            method.private(phase.name, parse_settings(phase), recipe, rows)
            if method.private is not None
            else None
        )
        if found is not None:
            private.append(found)
        elif method.trains:
            without.append(phase.name)
    if recipe.start is not None:
        without.insert(0, f"run {recipe.start.run}")
    return make_plan(private, rows, without)


def with_own_passes(recipe: Recipe) -> PhaseSettings | None:
    """Returns the first phase that bypasses `Party.encode`, so supports neither bfloat16 nor
    several GPUs; or None.
    """
    return next((phase for phase in recipe.phases if not load_method(phase.kind).encodes), None)


def check_together(recipe: Recipe, rows: int) -> None:
    """Raises InputError if the phases do not fit together, over ``rows`` training rows."""
    check_fit(recipe)
    privacy_plan(recipe, rows)


def check_fit(recipe: Recipe) -> None:
    """Raises InputError if the phases do not fit together, however many rows there are."""
    _check_rows(recipe)
    methods = [(each.name, load_method(each.kind)) for each in recipe.phases]
    alone = next(
        (name for name, method in methods if method.own is not None or not method.kept), None
    )
    if alone is not None and len(recipe.phases) > 1:
        raise InputError(Code.CONFIG_INVALID, f"recipe: {must_be_alone(alone)}")
    if alone is not None and recipe.start is not None:
        raise InputError(Code.CONFIG_INVALID, f"recipe: {must_not_start(alone)}")
    own = with_own_passes(recipe)
    if own is not None and recipe.model.precision != "float32":
        text = f"recipe: phases: {own.name}: a phase of kind {own.kind!r} computes only in float32"
        raise InputError(
            Code.CONFIG_INVALID, f'{text}; remove model.precision = "{recipe.model.precision}"'
        )


def _check_rows(recipe: Recipe) -> None:
    """Raises InputError if a phase needs rows that the recipe's alignment does not give."""
    own = recipe.rows.align == "none"
    _check_mixed(recipe)
    for phase in recipe.phases:
        wants = load_method(phase.kind).rows
        if own == (wants == "own") or not recipe.passives:
            continue
        where = f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r}"
        if own:
            text = 'needs rows that all parties hold, and with rows.align = "none" each has its own'
            ways = 'take "mocosfl" and "probe", or rows.align = "digest" or "psi"'
            raise InputError(Code.CONFIG_INVALID, f"{where} {text}; {ways}")
        text = "trains on rows of which each party has its own"
        raise InputError(Code.CONFIG_INVALID, f'{where} {text}; set rows.align = "none"')


def _check_mixed(recipe: Recipe) -> None:
    """Raises InputError if phases on a network cut in two and phases on whole encoders follow each
    other.
    """
    # What the rows are -> the first kind.
    kinds = dict[str, str]()
    for phase in (*(recipe.start.phases if recipe.start is not None else ()), *recipe.phases):
        kinds.setdefault(load_method(phase.kind).rows, phase.kind)
    if len(kinds) > 1 and (not recipe.passives or recipe.start is not None):
        text = (
            f"a phase of kind {kinds['own']!r} leaves a network cut in two, and one of kind "
            f"{kinds['aligned']!r}"
        )
        text = f"recipe: phases: {text} needs a whole encoder"
        raise InputError(
            Code.CONFIG_INVALID, f'{text}; take "mocosfl" and "probe", or other kinds alone'
        )


@blaming()
def build_phases(recipe: Recipe, party: Party) -> list[Phase]:
    """Makes this party's side of every phase of the recipe. Raises InputError."""
    phases = []
    check_together(recipe, len(party.rows("train")))
    if party.role == "active":
        for metric in recipe.task.metrics:
            load_metric(metric)
    party.privacy, party.sent_noise = (
        privacy_plan(recipe, len(party.rows("train"))),
        sent_noise(recipe),
    )
    party.late_policy, party.protected = late_policy(recipe), protected(recipe)
    for phase in recipe.phases:
        side: Callable[[Party, str, Section], Phase] = getattr(load_method(phase.kind), party.role)
        made = side(party, phase.name, parse_settings(phase))
        lacks = next(
            (each for each in ("name", "rounds", "run_round") if not hasattr(made, each)), None
        )
        if lacks is not None:
            text = (
                f"recipe: phases: {phase.name}: the {type(made).__name__} of kind "
                f"{phase.kind!r} has no {lacks!r}"
            )
            raise InputError(
                Code.CONFIG_INVALID,
                f"{text}; set it in __init__, as vfl_party.base.phase.Phase says",
            )
        phases.append(made)
    opened = {key: each.exchange for key, each in party.exchanges.items()}
    check_asked(recipe, opened)
    check_wire(recipe, opened)
    rounds = sum(phase.rounds for phase in phases)
    if rounds > MOST_ROUNDS:
        text = (
            f"recipe: phases: {rounds:,} rounds in all, and the labels of checkpoints count to "
            f"{MOST_ROUNDS:,}"
        )
        raise InputError(
            Code.CONFIG_INVALID,
            f"{text}; train for fewer, or let a round be longer (validate_every)",
        )
    return phases
