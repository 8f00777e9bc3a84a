"""Course: the phases of a recipe, each with its method and settings, and what follows from them.

Methods are found by name, in ``vfl_party.methods`` or as plug-ins: nothing here knows one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic_core import PydanticSerializationError
from torch import nn

from vfl_common.config.base import Section, parse
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import PhaseSettings
from vfl_common.config.spelling import Spelling
from vfl_common.errors import Code, InputError
from vfl_common.stages import MAX_ROUNDS
from vfl_party.base.phase import Phase
from vfl_party.base.plugins import Registry, name_plugin_errors
from vfl_party.models.metrics import load_metric, loss_fn
from vfl_party.outbound import codecs, transforms
from vfl_party.outbound.chains import check_transforms, check_wire
from vfl_party.outbound.declared import PREDICTION, Exchange
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.check_task import check_chooses, check_follows, check_idle, check_task
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method
from vfl_party.phases.online import Online
from vfl_party.phases.scoring import Scorer, scoring
from vfl_party.phases.sets import Learnt
from vfl_party.privacy.plan import PrivacyPlan, make_plan

REGISTRY = Registry("vfl.methods", "phase of kind", "vfl_party.methods", "METHOD")


def kinds() -> list[str]:
    """Returns all kinds that a recipe can name."""
    return REGISTRY.names()


def load_method(kind: str) -> Method[Any]:
    """Returns the method of a kind. Raises InputError, naming the nearest kind, if there is
    none.
    """
    method = REGISTRY.load(kind, "recipe: phases")
    if not isinstance(method, Method):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: the plug-in {kind!r} is not a vfl_party.phases.method.Method. Export "
            "an instance of it.",
        )
    return method


class NamedPhase:
    """One phase as the recipe names it, with its method and settings; they are read when they are
    first asked for.
    """

    def __init__(self, written: PhaseSettings) -> None:
        self.written = written

    @property
    def name(self) -> str:
        """The phase's name in the recipe."""
        return self.written.name

    @property
    def kind(self) -> str:
        """The name of the method."""
        return self.written.kind

    @cached_property
    def method(self) -> Method[Any]:
        """The method of the kind. Raises InputError if there is none."""
        return load_method(self.written.kind)

    @cached_property
    def settings(self) -> Any:
        """The phase's keys as its method's model. Raises InputError."""
        return parse(
            self.method.settings, self.written.settings, f"recipe: phases: {self.written.name}"
        )

    @property
    def evaluates(self) -> tuple[str, ...]:
        """The splits for whose rows, if there are any, the phase reports metrics."""
        return tuple(getattr(self.settings, "splits", ()))

    def says(self, what: str) -> bool:
        """Whether the method overrides a member of ``Method``."""
        return getattr(type(self.method), what) is not getattr(Method, what)


class Course:
    """The phases of a recipe, each read once, at its first use. Every member may raise InputError:
    a kind of phase may be unknown, or its settings wrong.

    ``phases``: the recipe's, in order. ``before``: those of the run that this one starts from, as
    far as ``start.phases`` names them. A phase of ``before`` runs no more: its settings are read
    only if its method says something of the encoder.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.phases = tuple(NamedPhase(phase) for phase in recipe.phases)
        start = recipe.start
        self.before = tuple(
            NamedPhase(phase) for phase in (start.phases if start is not None else ())
        )

    def after_labels(self, phase: str) -> bool:
        """Whether what ``phase`` sends can depend on labels by what precedes it: a phase that has
        trained on labels, the run that this one starts from, or, before the first phase, a
        stratified division of the rows.
        """
        names = [named.name for named in self.phases]
        if phase not in names:
            return self.recipe.rows.split == "stratified"
        earlier = self.phases[: names.index(phase)]
        return self.recipe.start is not None or any(
            named.method.follows(named.settings) is not None for named in earlier
        )

    @name_plugin_errors()
    def encoder(self, make: MakeEncoder) -> nn.Module:
        """Makes the encoder that all phases share: by the first method that makes one, else a
        single encoder. The phases of the run that this one starts from come first.

        Raises InputError.
        """
        encoder: nn.Module | None = None
        maker: Method[Any] | None = None
        for phase in (*self.before, *self.phases):
            if phase.says("encoder"):
                maker = phase.method
                encoder = maker.encoder(phase.settings, make)
            if encoder is not None:
                break
        start = self.recipe.start
        if start is None or start.tower is None:
            return encoder or make("encoder")
        where = f"recipe: start.tower = {start.tower!r}"
        try:
            part = maker.part(encoder, start.tower) if encoder is not None and maker else None
        except ValueError as error:
            raise InputError(Code.CONFIG_INVALID, f"{where}: {error}") from None
        if part is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the phases of {start.run} do not hand on two encoders. Remove it, or "
                "give start.phases as that run has them.",
            )
        return part

    @name_plugin_errors()
    def upper(self, seed: int) -> dict[str, nn.Module]:
        """Makes what the phases of the active party share of a network that is cut: by the first
        method that makes it.

        ``seed``: the active party's own, see ``Party.own_seed``. Raises InputError.
        """
        for phase in (*self.before, *self.phases):
            if phase.says("upper"):
                return phase.method.upper(phase.settings, self.recipe, seed)
        return {}

    @name_plugin_errors()
    def solo(self, make: MakeEncoder) -> nn.Module | None:
        """Makes the model with which the active party scores rows by itself, by the first method
        that makes one; None if no phase trains one. Raises InputError.
        """
        models = (phase.method.solo(phase.settings, make) for phase in self.phases)
        return next((model for model in models if model is not None), None)

    @property
    def own_labels(self) -> bool:
        """Whether a phase learns from the labels of rows that only the active party has."""
        return any(phase.says("solo") for phase in self.phases)

    @name_plugin_errors()
    def own_models(self) -> dict[str, nn.Module]:
        """Makes the models of the recipe's method that are neither encoder nor top; mostly none."""
        models: dict[str, nn.Module] = {}
        for phase in self.phases:
            models |= phase.method.own_models()
        return models

    @cached_property
    def lone_phase(self) -> NamedPhase | None:
        """The phase whose model no other phase works with; None if all phases share encoders."""
        return next((phase for phase in self.phases if phase.method.model != "shared"), None)

    @cached_property
    def keeps_nothing(self) -> str | None:
        """The name of the first phase whose model ends with it; None if every phase keeps its
        model.
        """
        return next((phase.name for phase in self.phases if phase.method.model == "none"), None)

    # -- what crosses
    # ----------------------------------------------------------------------

    @cached_property
    @name_plugin_errors()
    def sent_noise(self) -> float:
        """σ of the noise on a passive party's embeddings in evaluation and prediction: the phases'
        largest.
        """
        return max(0.0, *(phase.method.noise(phase.settings) for phase in self.phases))

    @cached_property
    @name_plugin_errors()
    def protected(self) -> str:
        """How the phases' encoders protect the embeddings that they give, in words; '' if they do
        not.
        """
        reasons = [
            phase.method.protects(phase.settings)
            for phase in (*self.before, *self.phases)
            if phase.says("protects")
        ]
        return next((reason for reason in reasons if reason), "")

    @cached_property
    @name_plugin_errors()
    def in_flight(self) -> int:
        """How many exchanges of one passive party may be under way, in any phase."""
        return max(phase.method.in_flight(phase.settings) for phase in self.phases)

    @cached_property
    @name_plugin_errors()
    def scores_own_rows(self) -> bool:
        """Whether the phases leave a head that scores rows which different parties hold."""
        return any(phase.method.scores_own_rows(phase.settings) for phase in self.phases)

    @name_plugin_errors()
    def scores(self, party: Party, phase: str) -> Scorer | None:
        """Makes the party's side of the joint prediction, if the recipe's method has its own.
        Raises InputError.
        """
        for named in self.phases:
            scorer = named.method.scores(party, phase, named.settings)
            if scorer is not None:
                return scorer
        return None

    @name_plugin_errors()
    def online(self, party: Party) -> Online | None:
        """Makes the party's side of the scoring by id, if the recipe's method has its own. Raises
        InputError.
        """
        for phase in self.phases:
            online = phase.method.online(party, phase.settings)
            if online is not None:
                return online
        return None

    @cached_property
    def oldest_protocol(self) -> int:
        """The oldest protocol with which all phases can be run."""
        return max(phase.method.protocol for phase in self.phases)

    # -- how it trains
    # ----------------------------------------------------------------------

    @cached_property
    @name_plugin_errors()
    def late_policy(self) -> LatePolicy:
        """The stand-in for a party in the first phase that goes on without one; ``wait`` if all
        phases wait.
        """
        policies = (phase.method.late_policy(phase.settings) for phase in self.phases)
        return next((policy for policy in policies if policy != "wait"), "wait")

    @cached_property
    @name_plugin_errors()
    def learns(self) -> Learnt:
        """How the phases train the model to do without a party; '' if they do not. Raises
        InputError if two of them do so in different ways.
        """
        ways = [phase.method.learns(phase.settings) for phase in self.phases]
        if "subsets" in ways and "party_dropout" in ways:
            raise InputError(
                Code.CONFIG_INVALID,
                "recipe: phases: one trains with subsets and another one with party_dropout. Take "
                "the same in both.",
            )
        return next((way for way in ways if way), "")

    @property
    def copes(self) -> bool:
        """Whether the model has been trained to do without a passive party: on sets of them, or on
        rows that some do not hold.
        """
        return bool(self.learns) or self.recipe.rows.partial

    @property
    def without(self) -> LatePolicy:
        """The stand-in for a party that is away when rows are scored."""
        # The parties that hold a row are combined without the others.
        partly = self.recipe.rows.partial and self.late_policy == "wait"
        return "skip" if self.learns or partly else self.late_policy

    @name_plugin_errors()
    def privacy(self, rows: int) -> PrivacyPlan | None:
        """Returns the budget of the phases with ``dp`` over ``rows`` training rows, equal at every
        party; None if no phase has ``dp``.

        Raises InputError if the phases do not fit together.
        """
        private, without = [], []
        for phase in self.phases:
            plan = phase.method.private(phase.name, phase.settings, self.recipe, rows)
            if plan is not None:
                private.append(plan)
            elif phase.method.trains:
                without.append(phase.name)
        if self.recipe.start is not None:
            without.insert(0, f"run {self.recipe.start.run}")
        return make_plan(private, rows, without)

    @cached_property
    def evaluated(self) -> frozenset[str]:
        """The splits for whose rows, if there are any, some phase reports metrics."""
        return frozenset(split for phase in self.phases for split in phase.evaluates)

    @cached_property
    @name_plugin_errors()
    def follows_preset(self) -> bool:
        """Whether ``preset`` changes what a phase does, of this run or of the one that it starts
        from.
        """
        return any(
            phase.method.follows_preset(phase.written.settings)
            for phase in (*self.before, *self.phases)
        )

    @cached_property
    def own_passes(self) -> NamedPhase | None:
        """The first phase that bypasses ``Party.encode``, so does not support bfloat16; None if all
        go through it.
        """
        return next((phase for phase in self.phases if not phase.method.encodes), None)

    # -- the recipe
    # ----------------------------------------------------------------------

    @cached_property
    def filled(self) -> Spelling:
        """The recipe for a comparison with that of another release: with the defaults of methods
        and filters.
        """
        phases = []
        for phase in self.phases:
            uses = [
                (transforms.load(use.kind, f"recipe: phases: {phase.name}").settings, use.settings)
                for use in phase.written.transforms
            ]
            phases.append(
                {
                    "settings": _fill_defaults(phase.method.settings, phase.written.settings),
                    "transforms": [{"settings": _fill_defaults(*use)} for use in uses],
                }
            )
        wire = [
            {
                "settings": _fill_defaults(
                    codecs.settings_of(table.codec, "recipe: wire"), table.settings
                )
            }
            for table in self.recipe.wire
        ]
        return self.recipe.spelling({"phases": phases, "wire": wire})

    def check(self, rows: int | None = None) -> None:
        """Raises InputError if the phases do not fit together, over ``rows`` training rows; None:
        however many there are.
        """
        self._check_lone()
        self._check_rows()
        check_task(self.recipe.task, self.phases)
        check_idle(self.recipe, self.phases)
        for phase in self.phases:
            phase.method.check_top(phase.name, phase.settings, self.recipe)
        own, precision = self.own_passes, self.recipe.model.precision
        if own is not None and precision != "float32":
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {own.name}: a phase of kind {own.kind!r} computes only in "
                f'float32. Remove model.precision = "{precision}".',
            )
        self._check_sizes()
        if rows is not None:
            self.privacy(rows)

    def _check_sizes(self) -> None:
        """Raises InputError if a party sets the width of its embedding, and a phase gives all
        parties the same width.
        """
        own = next(
            (party for party in self.recipe.parties if party.embedding_size is not None), None
        )
        for phase in self.phases if own is not None else ():
            if own is not None and not phase.method.own_sizes(phase.settings):
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r} gives all "
                    "parties embeddings of one width. Remove "
                    f"parties.{own.name}.embedding_size.",
                )

    def _check_lone(self) -> None:
        """Raises InputError if a phase with its own model is not alone, or another one has no
        table ``model``.
        """
        lone = self.lone_phase
        if lone is None:
            if "model" not in self.recipe.model_fields_set:
                raise InputError(Code.CONFIG_INVALID, "recipe: model: missing. Add it.")
            return
        others = [phase for phase in self.phases if phase is not lone]
        if others and not any(phase.method.trains for phase in others) and lone.evaluates:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {others[0].name}: a phase of kind {lone.kind!r} evaluates its "
                f"model itself. Remove {others[0].name}.",
            )
        if others:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: a phase of kind {lone.kind!r} has its own model that "
                "no other phase works with. Remove the other phases.",
            )
        if self.recipe.start is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: start: a phase of kind {lone.kind!r} trains its own model, "
                "and can take nothing from an earlier run. Remove start (in a study: pretrain).",
            )

    def _check_rows(self) -> None:
        """Raises InputError if a phase needs rows that the recipe's alignment does not give."""
        own = self.recipe.rows.align == "none"
        self._check_mixed()
        if self.recipe.rows.partial:
            self._check_partial()
        for phase in self.phases:
            if own == (phase.method.rows == "own") or not self.recipe.passives:
                continue
            where = f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r}"
            if own:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f'{where} needs rows that all parties hold (got rows.align = "none"). Take '
                    f'{_of_own_rows()}, or rows.align = "digest" or "psi".',
                )
            raise InputError(
                Code.CONFIG_INVALID,
                f'{where} trains on each party\'s own rows. Set rows.align = "none".',
            )

    def _check_partial(self) -> None:
        """Raises InputError if a phase cannot work with rows that some parties do not hold."""
        where = "recipe: rows.partial"
        for phase in self.phases:
            reason = phase.method.no_partial(phase.settings)
            if reason:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{where}: phase {phase.name}: {reason}. Remove one of the two.",
                )
        if self.recipe.task.compares:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the loss of a {self.recipe.task.kind} task compares rows, and they "
                "have different parties. Remove partial.",
            )

    def _check_mixed(self) -> None:
        """Raises InputError if phases on a network cut in two and phases on whole encoders follow
        each other.
        """
        # What the rows are -> the first kind.
        first = dict[str, str]()
        for phase in (*self.before, *self.phases):
            first.setdefault(phase.method.rows, phase.kind)
        if len(first) > 1 and (not self.recipe.passives or self.recipe.start is not None):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: a phase of kind {first['own']!r} leaves a network cut in two, "
                f"and one of kind {first['aligned']!r} needs a whole encoder. Take "
                f"{_of_own_rows()}, or other kinds alone.",
            )

    @property
    def _prediction(self) -> Exchange | None:
        """The exchange of a joint prediction, for its transforms; None without one, or if its
        numbers are not embeddings.
        """
        if self.lone_phase is not None or self.keeps_nothing is not None:
            return None
        return scoring(self.sent_noise, name=PREDICTION, how=self.protected)

    @name_plugin_errors()
    def build(self, party: Party) -> list[Phase]:
        """Makes this party's side of every phase. Raises InputError."""
        self.check(len(party.rows("train")))
        if party.role == "active":
            for metric in self.recipe.task.plugin_metrics:
                load_metric(metric)
            # It loads the loss of a plug-in.
            loss_fn(self.recipe.task)
            if self.recipe.rows.align != "none":
                check_chooses(self.recipe.task, len(party.rows("validation")))
            if party.data.weights is not None:
                check_follows(self.phases, "weight", "data.weight")
        phases = [_side(phase, party) for phase in self.phases]
        opened = {key: exchange.exchange for key, exchange in party.exchanges.items()}
        check_transforms(self.recipe, opened, self._prediction)
        check_wire(self.recipe, opened)
        rounds = sum(phase.rounds for phase in phases)
        if rounds > MAX_ROUNDS:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: must have at most {MAX_ROUNDS:,} rounds in all (got "
                f"{rounds:,}). Train for fewer, or let a round be longer (validate_every).",
            )
        return phases


def _side(phase: NamedPhase, party: Party) -> Phase:
    """Makes the party's side of a phase. Raises InputError if it lacks what every phase has."""
    method = phase.method
    make = method.active if party.role == "active" else method.passive
    made = make(party, phase.name, phase.settings)
    for lacks in ("name", "rounds", "run_round"):
        if not hasattr(made, lacks):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: the {type(made).__name__} of kind {phase.kind!r} "
                f"has no {lacks!r}. Set it in __init__, as vfl_party.base.phase.Phase says.",
            )
    return made


def _of_own_rows() -> str:
    """Names our own kinds that train on rows of each party's own, as in ``"a" and "b"``."""
    ours = [kind for kind in kinds() if REGISTRY.is_ours(kind)]
    return " and ".join(f'"{kind}"' for kind in ours if load_method(kind).rows == "own")


def _fill_defaults(model: type[Section] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the defaults of their model; nothing if JSON lacks their types, as a
    plug-in's may be.
    """
    try:
        return parse(model, settings, "recipe").model_dump(mode="json") if model is not None else {}
    except PydanticSerializationError:
        return {}
