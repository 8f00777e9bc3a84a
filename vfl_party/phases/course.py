"""Defines Course: the phases of a recipe with their methods and settings, and the settings of the
run that follow from them.

Methods are found by name, in ``vfl_party.methods`` or as plug-ins. This module refers to no
specific method.
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
from vfl_party.models.losses import loss_fn
from vfl_party.models.metrics import load_metric
from vfl_party.outbound import codecs, transforms
from vfl_party.outbound.chains import check_transforms, check_wire
from vfl_party.outbound.declared import PREDICTION, Exchange
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.check_task import check_chooses, check_follows, check_idle, check_task
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method, MethodFacts, get_facts
from vfl_party.phases.online import Online
from vfl_party.phases.scoring import Scorer, scoring
from vfl_party.phases.sets import Learnt
from vfl_party.privacy.plan import PrivacyPlan, make_plan

REGISTRY = Registry("vfl.methods", "phase of kind", "vfl_party.methods", "METHOD")


def list_kinds() -> list[str]:
    """Returns all kinds of phases that a recipe can name."""
    return REGISTRY.names()


def load_method(kind: str) -> Method[Any]:
    """Returns the method of a kind. Raises InputError, which suggests the most similar kind, if
    there is none.
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
    """A phase of the recipe, with its method and settings. Both are read at their first use."""

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

    @cached_property
    @name_plugin_errors()
    def facts(self) -> MethodFacts:
        """What the settings imply for the run."""
        return get_facts(self.method, self.settings)

    @property
    def evaluates(self) -> tuple[str, ...]:
        """The splits on which the phase reports metrics, if they have rows."""
        return tuple(getattr(self.settings, "splits", ()))

    def says(self, what: str) -> bool:
        """Whether the method overrides a member of ``Method``."""
        return getattr(type(self.method), what) is not getattr(Method, what)


class Course:
    """The phases of a recipe. Each phase is read once, at its first use. Every member may raise
    InputError, because the kind of a phase may be unknown or its settings wrong.

    ``phases``: The recipe's phases, in order. ``before``: The phases in ``start.phases``, of the
    run from which this run starts. They do not run again. Their settings are read only if their
    methods affect the encoder.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.phases = tuple(NamedPhase(phase) for phase in recipe.phases)
        start = recipe.start
        self.before = tuple(
            NamedPhase(phase) for phase in (start.phases if start is not None else ())
        )

    def after_labels(self, phase: str) -> bool:
        """Returns whether values that ``phase`` sends can depend on labels because of something
        before it: an earlier phase that trains on labels, the run from which this run starts, or a
        stratified division of the rows.
        """
        names = [named.name for named in self.phases]
        if phase not in names:
            return self.recipe.rows.split == "stratified"
        earlier = self.phases[: names.index(phase)]
        return self.recipe.start is not None or any(
            named.facts.follows is not None for named in earlier
        )

    @name_plugin_errors()
    def encoder(self, make: MakeEncoder) -> nn.Module:
        """Makes the encoder that all phases share. The first method that defines an encoder makes
        it, starting with the phases of ``before``. Without such a method, it is a single encoder.

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
            tower = maker.part(encoder, start.tower) if encoder is not None and maker else None
        except ValueError as error:
            raise InputError(Code.CONFIG_INVALID, f"{where}: {error}") from None
        if tower is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the phases of {start.run} do not train two encoders. Remove it, or "
                "give start.phases as that run has them.",
            )
        return tower

    @name_plugin_errors()
    def upper(self, seed: int) -> dict[str, nn.Module]:
        """Makes the active party's upper part of a split network. The first method that defines it
        makes it. Returns {} if the network is not split.

        ``seed``: The active party's own seed, see ``Party.own_seed``. Raises InputError.
        """
        for phase in (*self.before, *self.phases):
            if phase.says("upper"):
                return phase.method.upper(phase.settings, self.recipe, seed)
        return {}

    @name_plugin_errors()
    def solo(self, make: MakeEncoder) -> nn.Module | None:
        """Makes the model with which the active party scores rows without the other parties. The
        first method that defines it makes it. Returns None if no phase trains such a model. Raises
        InputError.
        """
        models = (phase.method.solo(phase.settings, make) for phase in self.phases)
        return next((model for model in models if model is not None), None)

    @property
    def own_labels(self) -> bool:
        """Whether a phase learns from the labels of rows that only the active party has."""
        return any(phase.says("solo") for phase in self.phases)

    @name_plugin_errors()
    def own_models(self) -> dict[str, nn.Module]:
        """Makes the models of the recipe's methods that are neither encoder nor top model. Most
        methods have none.
        """
        models: dict[str, nn.Module] = {}
        for phase in self.phases:
            models |= phase.method.own_models()
        return models

    @cached_property
    def lone_phase(self) -> NamedPhase | None:
        """The phase whose model no other phase uses; None if all phases share encoders."""
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
        """The standard deviation of the noise on a passive party's embeddings in evaluation and
        prediction: the maximum over the phases.
        """
        return max(0.0, *(phase.facts.noise for phase in self.phases))

    @cached_property
    @name_plugin_errors()
    def protected(self) -> str:
        """A phrase that says how the phases' encoders protect the embeddings; '' if they do not."""
        reasons = [
            phase.facts.protects
            for phase in (*self.before, *self.phases)
            if phase in self.phases or phase.says("encoder")
        ]
        return next((reason for reason in reasons if reason), "")

    @cached_property
    @name_plugin_errors()
    def in_flight(self) -> int:
        """The maximum number of concurrent exchanges of one passive party, over all phases."""
        return max(phase.facts.in_flight for phase in self.phases)

    @cached_property
    @name_plugin_errors()
    def scores_own_rows(self) -> bool:
        """Whether the phases train a head that scores rows of different parties."""
        return any(phase.facts.scores_own_rows for phase in self.phases)

    @name_plugin_errors()
    def scores(self, party: Party, phase: str) -> Scorer | None:
        """Makes the party's side of the joint prediction, if a method of the recipe defines it;
        None otherwise. Raises InputError.
        """
        for named in self.phases:
            scorer = named.method.scores(party, phase, named.settings)
            if scorer is not None:
                return scorer
        return None

    @name_plugin_errors()
    def online(self, party: Party) -> Online | None:
        """Makes the party's side of scoring by id, if a method of the recipe defines it; None
        otherwise. Raises InputError.
        """
        for phase in self.phases:
            online = phase.method.online(party, phase.settings)
            if online is not None:
                return online
        return None

    @cached_property
    def oldest_protocol(self) -> int:
        """The oldest protocol version with which all phases can run."""
        return max(phase.method.protocol for phase in self.phases)

    # -- how it trains
    # ----------------------------------------------------------------------

    @cached_property
    @name_plugin_errors()
    def late_policy(self) -> LatePolicy:
        """The late policy of the first phase that continues without a party; ``wait`` if all phases
        wait.
        """
        policies = (phase.facts.late_policy for phase in self.phases)
        return next((policy for policy in policies if policy != "wait"), "wait")

    @cached_property
    @name_plugin_errors()
    def learns(self) -> Learnt:
        """How the phases train the model for missing parties; '' if they do not. Raises InputError
        if two phases do it in different ways.
        """
        kinds_of_training = [phase.facts.learns for phase in self.phases]
        if "subsets" in kinds_of_training and "party_dropout" in kinds_of_training:
            raise InputError(
                Code.CONFIG_INVALID,
                "recipe: phases: one phase trains with subsets and another with party_dropout. Use "
                "the same in both.",
            )
        return next((kind for kind in kinds_of_training if kind), "")

    @property
    def copes(self) -> bool:
        """Whether the model was trained for missing passive parties: on sets of parties, or on rows
        that some parties do not have.
        """
        return bool(self.learns) or self.recipe.rows.partial

    @property
    def without(self) -> LatePolicy:
        """The late policy for a party that is missing when rows are scored."""
        # With partial rows, only the parties that have a row are combined.
        partly = self.recipe.rows.partial and self.late_policy == "wait"
        return "skip" if self.learns or partly else self.late_policy

    @name_plugin_errors()
    def privacy(self, rows: int) -> PrivacyPlan | None:
        """Returns the privacy budget of the phases with ``dp``, the same at every party; None if no
        phase has ``dp``. ``rows``: The number of training rows.

        Raises InputError if the phases do not fit together.
        """
        private_phases, public_phases = [], []
        for phase in self.phases:
            plan = phase.method.private(phase.name, phase.settings, self.recipe, rows)
            if plan is not None:
                private_phases.append(plan)
            elif phase.method.trains:
                public_phases.append(phase.name)
        if self.recipe.start is not None:
            public_phases.insert(0, f"run {self.recipe.start.run}")
        return make_plan(private_phases, rows, public_phases)

    @cached_property
    def evaluated(self) -> frozenset[str]:
        """The splits on which some phase reports metrics, if they have rows."""
        return frozenset(split for phase in self.phases for split in phase.evaluates)

    @cached_property
    @name_plugin_errors()
    def follows_preset(self) -> bool:
        """Whether ``preset`` affects a phase of this run or of the run from which it starts."""
        return any(
            phase.method.follows_preset(phase.written.settings)
            for phase in (*self.before, *self.phases)
        )

    @cached_property
    def own_passes(self) -> NamedPhase | None:
        """The first phase that does not use ``Party.encode`` for all passes, so does not support
        bfloat16; None if all phases use it.
        """
        return next((phase for phase in self.phases if not phase.method.encodes), None)

    # -- the recipe
    # ----------------------------------------------------------------------

    @cached_property
    def filled(self) -> Spelling:
        """The recipe with all defaults of methods, transforms and codecs, for a comparison with the
        recipe of another release.
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
        """Raises InputError if the phases do not fit together. ``rows``: The number of training
        rows; None if it is unknown.
        """
        self._check_lone()
        self._check_rows()
        check_task(self.recipe.task, self.phases)
        check_idle(self.recipe, self.phases)
        for phase in self.phases:
            phase.method.check_top(phase.name, phase.settings, self.recipe)
        own_pass_phase, precision = self.own_passes, self.recipe.model.precision
        if own_pass_phase is not None and precision != "float32":
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {own_pass_phase.name}: a phase of kind "
                f"{own_pass_phase.kind!r} computes only in "
                f'float32. Remove model.precision = "{precision}".',
            )
        self._check_sizes()
        if rows is not None:
            self.privacy(rows)

    def _check_sizes(self) -> None:
        """Raises InputError if a party sets the width of its embeddings, but a phase needs the same
        width at all parties.
        """
        sized_party = next(
            (party for party in self.recipe.parties if party.embedding_size is not None), None
        )
        for phase in self.phases if sized_party is not None else ():
            if sized_party is not None and not phase.facts.own_sizes:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r} gives all "
                    "parties embeddings of one width. Remove "
                    f"parties.{sized_party.name}.embedding_size.",
                )

    def _check_lone(self) -> None:
        """Raises InputError if a phase with its own model is not the only phase, or if shared
        models lack the table ``model``.
        """
        lone_phase = self.lone_phase
        if lone_phase is None:
            if "model" not in self.recipe.model_fields_set:
                raise InputError(
                    Code.CONFIG_INVALID, "recipe: model: the table is missing. Add it."
                )
            return
        other_phases = [phase for phase in self.phases if phase is not lone_phase]
        if (
            other_phases
            and not any(phase.method.trains for phase in other_phases)
            and lone_phase.evaluates
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {other_phases[0].name}: a phase of kind {lone_phase.kind!r} "
                "evaluates its "
                f"model itself. Remove {other_phases[0].name}.",
            )
        if other_phases:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: a phase of kind {lone_phase.kind!r} has its own model that "
                "no other phase uses. Remove the other phases.",
            )
        if self.recipe.start is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: start: a phase of kind {lone_phase.kind!r} trains its own model, "
                "and cannot start from an earlier run. Remove start (in a study: pretrain).",
            )

    def _check_rows(self) -> None:
        """Raises InputError if a phase needs other rows than the recipe's alignment provides."""
        has_own_rows = self.recipe.rows.align == "none"
        self._check_mixed()
        if self.recipe.rows.partial:
            self._check_partial()
        for phase in self.phases:
            if has_own_rows == (phase.method.rows == "own") or not self.recipe.passives:
                continue
            where = f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r}"
            if has_own_rows:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f'{where} needs rows that all parties have (got rows.align = "none"). Use '
                    f'{_list_own_row_kinds()}, or rows.align = "digest" or "psi".',
                )
            raise InputError(
                Code.CONFIG_INVALID,
                f'{where} trains on each party\'s own rows. Set rows.align = "none".',
            )

    def _check_partial(self) -> None:
        """Raises InputError if a phase cannot train on rows that some parties do not have."""
        where = "recipe: rows.partial"
        for phase in self.phases:
            reason = phase.facts.no_partial
            if reason:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{where}: phase {phase.name}: {reason}. Remove one of the two.",
                )
        if self.recipe.task.compares:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the loss of a {self.recipe.task.kind} task compares rows, and with "
                "partial they "
                "have different parties. Remove partial.",
            )

    def _check_mixed(self) -> None:
        """Raises InputError if the recipe mixes phases on a split network and phases on whole
        encoders.
        """
        # {the kind of rows: the first kind of phase that trains on them}.
        first_kinds = dict[str, str]()
        for phase in (*self.before, *self.phases):
            first_kinds.setdefault(phase.method.rows, phase.kind)
        if len(first_kinds) > 1 and (not self.recipe.passives or self.recipe.start is not None):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: a phase of kind {first_kinds['own']!r} trains a network split "
                "between the parties, "
                f"and a phase of kind {first_kinds['aligned']!r} needs a whole encoder. Use "
                f"only {_list_own_row_kinds()}, or only other kinds.",
            )

    @property
    def _prediction(self) -> Exchange | None:
        """The exchange of the joint prediction, whose transforms are checked; None if there is no
        such exchange of embeddings.
        """
        if self.lone_phase is not None or self.keeps_nothing is not None:
            return None
        return scoring(self.sent_noise, name=PREDICTION, how=self.protected)

    @name_plugin_errors()
    def build(self, party: Party) -> list[Phase]:
        """Makes this party's side of every phase. Raises InputError."""
        self.check(len(party.rows.get("train")))
        if party.role == "active":
            for metric in self.recipe.task.plugin_metrics:
                load_metric(metric)
            # This call loads a plug-in's loss function, so that a wrong name fails here.
            loss_fn(self.recipe.task)
            if self.recipe.rows.align != "none":
                check_chooses(self.recipe.task, len(party.rows.get("validation")))
            if party.rows.data.weights is not None:
                check_follows(self.phases, "weight", "data.weight")
        phases = [_make_side(phase, party) for phase in self.phases]
        exchanges = {key: exchange.exchange for key, exchange in party.exchanges.opened.items()}
        check_transforms(self.recipe, exchanges, self._prediction)
        check_wire(self.recipe, exchanges)
        rounds = sum(phase.rounds for phase in phases)
        if rounds > MAX_ROUNDS:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: must have at most {MAX_ROUNDS:,} rounds in all (got "
                f"{rounds:,}). Train for fewer, or let a round be longer (validate_every).",
            )
        return phases


def _make_side(phase: NamedPhase, party: Party) -> Phase:
    """Makes the party's side of a phase. Raises InputError if it lacks an attribute that every
    phase must have.
    """
    method = phase.method
    make = method.active if party.role == "active" else method.passive
    side = make(party, phase.name, phase.settings)
    for attribute in ("name", "rounds", "run_round"):
        if not hasattr(side, attribute):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: the {type(side).__name__} of kind {phase.kind!r} "
                f"has no {attribute!r}. Set it in __init__, as vfl_party.base.phase.Phase says.",
            )
    return side


def _list_own_row_kinds() -> str:
    """Returns the built-in kinds that train on each party's own rows, as a text like ``"a" and
    "b"``.
    """
    ours = [kind for kind in list_kinds() if REGISTRY.is_ours(kind)]
    return " and ".join(f'"{kind}"' for kind in ours if load_method(kind).rows == "own")


def _fill_defaults(model: type[Section] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the defaults of their model; {} if a plug-in's settings cannot be
    written as JSON.
    """
    try:
        return parse(model, settings, "recipe").model_dump(mode="json") if model is not None else {}
    except PydanticSerializationError:
        return {}
