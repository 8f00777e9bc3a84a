"""A party, assembled in one place: open its data, align its rows, assemble models and phases.

    opened = open_party(recipe, name, data, encoder)    # data; no network
    aligned = alignment_of(recipe).align(...)           # with the others
    party = assemble(opened, aligned)                   # rows, models, phases, plan, privacy: pure

Before joining, ``expected_rows(opened)`` stands for ``aligned``. ``vfl-party check``, a forecast, a
study's trial and a run work with the same ``Assembled``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from vfl_common.config.data import DataSettings, get_unaligned_settings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.errors import ChangedError, Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.stages import AggregationPlan, Job, Planned
from vfl_common.summary import ExchangeSummary
from vfl_party.align import AlignedRows, alignment_of
from vfl_party.assembly.models import build_models, load_models
from vfl_party.base.devices import random_states, set_random_states
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.phase import Phase, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.data import Table, load_table, read_table
from vfl_party.data.inputs.made import BatchLog
from vfl_party.data.rows import Prepared, prepare
from vfl_party.models import check_combination, check_top, seed_generator
from vfl_party.outbound.chains import PASSIVES, coding_of, summarize_exchanges
from vfl_party.outbound.exchange import Connections
from vfl_party.outbound.policies import Policy
from vfl_party.outbound.policies.allow_all import AllowAll
from vfl_party.outbound.sent import SentDigests
from vfl_party.phases.advice import check_roles, check_spelling, label_taken
from vfl_party.phases.context import Hooks, MakeEncoder, Party, PartyData
from vfl_party.phases.course import Course
from vfl_party.privacy.label_noise import mechanism, randomise
from vfl_party.ranks import SpreadEncoder, TablePart, check_spread

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
Load = Callable[[DataSettings, bool], Table]


class PutOnRanks(Protocol):
    """Puts an encoder on all processes of a party."""

    def __call__(
        self, encoder: nn.Module, prepared: Prepared, parts: Sequence[TablePart], noted: BatchLog
    ) -> SpreadEncoder:
        """Returns the encoder.

        Args:
            prepared: the rows.
            parts: where they are in the party's tables.
            noted: remembers how their batches are made.
        """
        ...


class Work(Protocol):
    """What a party is opened for: training, or prediction with a trained run.

    ``job``: the word for it. ``run_id``: the trained run; '' for training.
    """

    @property
    def job(self) -> Job: ...

    @property
    def run_id(self) -> str: ...

    def prepare(self, opened: OpenedParty, aligned: AlignedRows) -> Prepared:
        """Returns the aligned rows, ready for encoders. Raises InputError."""
        ...

    def begin(self, models: dict[str, nn.Module]) -> None:
        """Replaces the models' initial weights with those of an earlier run, if there is one.
        Raises InputError.
        """
        ...

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        """Makes the phases to run. Raises InputError."""
        ...


@dataclass(frozen=True)
class Training:
    """Runs all phases of the recipe. ``begin_with``: puts weights of an earlier run into the
    models.
    """

    begin_with: Callable[[dict[str, nn.Module]], None] | None = None

    job: ClassVar[Job] = "train"
    run_id: ClassVar[str] = ""

    def prepare(self, opened: OpenedParty, aligned: AlignedRows) -> Prepared:
        """Returns the aligned rows with their splits. Raises InputError."""
        rest = (aligned.rest(opened.table), opened.unaligned)
        return prepare(
            opened.recipe,
            opened.name,
            aligned.of(opened.table),
            opened.settings,
            opened.encoder,
            [table for table in rest if table is not None],
            aligned.division,
            tabular=opened.course.lone_phase is None,
            own_labels=opened.course.own_labels,
        )

    def begin(self, models: dict[str, nn.Module]) -> None:
        """Loads the weights of the earlier run, if there is one. Raises InputError."""
        if self.begin_with is not None:
            self.begin_with(models)

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        """Makes all phases of the recipe. Raises InputError."""
        _ = prepared
        return party.course.build(party)


# Training from initial weights.
TRAINING = Training()


@dataclass(frozen=True)
class OpenedParty:
    """A party's data, read and checked, before any contact with the others.

    Args:
        course: the recipe.
        name: the party's, in the recipe.
        settings: where the data lie, and how they are read.
        encoder: of this party.
        table: the rows to align, with labels at the active party.
        work: what the rows are for.
        unaligned: rows that only this party has.
        advice: a note for the person here, which the log has.
        sent: what this process sends, for the generations to come.
    """

    course: Course
    name: str
    settings: DataSettings
    encoder: EncoderSettings
    table: Table
    work: Work
    unaligned: Table | None = None
    advice: str = ""
    sent: SentDigests = field(default_factory=SentDigests, compare=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.course.recipe

    @property
    def divides(self) -> bool:
        """Whether the rows have splits; rows to predict have none."""
        return self.work.job == "train"

    def tell(self, show: Callable[..., None]) -> None:
        """Shows the person here which rows are left out, and the advice; the log has both."""
        for table in (self.table, self.unaligned):
            if table is not None and table.counts is not None and table.counts.left_out:
                show("left_out", source=table.source, why=table.counts.left_out)
        if self.advice:
            show("advice", said=self.advice)


def load(data: DataSettings, with_label: bool) -> Table:
    """Reads a table. Raises InputError."""
    return load_table(data, with_label=with_label)


def open_party(
    recipe: Recipe,
    name: str,
    data: DataSettings,
    encoder: EncoderSettings,
    load: Load = load,
    work: Work = TRAINING,
) -> OpenedParty:
    """Reads the data of a party. Rows to predict have no labels. Raises InputError."""
    course, labels = Course(recipe), work.job == "train"
    if labels:
        # The recipe is checked before a large table is read.
        course.check()
    data = data.with_id_rules(recipe.rows.id_rules)
    if course.own_models():
        data = data.with_missing()
    active = name == recipe.active.name
    if labels and not active:
        check_roles(name, data)
    if active:
        if labels:
            check_spelling(recipe, data)
        check_combination(recipe.model.combine)
        check_top(recipe.model.top)
        data = data.keeping_rows()
    # Every party divides its own rows.
    if not active and recipe.rows.align == "none" and data.split is not None:
        data = data.model_copy(update={"label": None})
    table = read_table(data, labels and active, load)
    more = get_unaligned_settings(data) if labels else None
    unaligned = load(more, False) if more is not None else None
    advice = label_taken(name, data) if labels and not active else ""
    if advice:
        log.warning("%s: %s", hide_passwords(data.source), advice, extra={"event": "advice"})
    return OpenedParty(course, name, data, encoder, table, work, unaligned, advice)


def expect_rows(opened: OpenedParty) -> AlignedRows:
    """Returns the rows that a party expects to train on, before any contact with the others: at
    most all of its own.
    """
    return alignment_of(opened.recipe, divides=opened.divides).get_expected(opened.table)


@dataclass
class Assembled:
    """A party ready to run: rows, models, phases, and what follows from them. It needs no network.

    ``generators``: the states of torch's generators after models and phases were made.
    """

    opened: OpenedParty
    prepared: Prepared
    party: Party
    phases: Sequence[Phase]
    generators: dict[str, Tensor] = field(repr=False)

    @property
    def plan(self) -> list[Planned]:
        """The phases, in order; the labels of checkpoints count in this plan."""
        passive = self.party.role == "passive"
        return [
            Planned(
                phase.name,
                phase.rounds,
                phase.alone_from,
                tuple(phase.skippable),
                phase.lenient and passive,
            )
            for phase in self.phases
        ]

    @property
    def aggregations(self) -> tuple[AggregationPlan, ...]:
        """The weights that the phases swap with the server."""
        rounds = {phase.name: phase.rounds for phase in self.phases}
        recipe, plans = self.party.recipe, []
        for (phase, _), opened in self.party.exchanges.items():
            if opened.exchange.asks == "server":
                up, down = (
                    coding_of(recipe, phase, opened.exchange, direction)
                    for direction in ("up", "down")
                )
                spec = opened.chains.up.before_codec(opened.exchange.up.spec())
                of = opened.exchange
                plans.append(
                    AggregationPlan(phase, rounds[phase], spec, of.passive, up, down, of.draw)
                )
        return tuple(plans)

    @property
    def privacy_json(self) -> str:
        """The summary's part about differential privacy, from the active party; '' if no phase has
        any.
        """
        private = self.party.privacy if self.party.role == "active" else None
        return private.report().model_dump_json() if private is not None else ""

    @property
    def exchanges(self) -> list[ExchangeSummary]:
        """The exchanges of the phases, with their chains; empty if the active party is alone."""
        party, recipe = self.party, self.party.recipe
        aligning = alignment_of(recipe, divides=self.opened.divides).occurrences(
            len(self.prepared.table)
        )
        keys = {
            (occurrence.step.phase, occurrence.exchange.name): occurrence for occurrence in aligning
        }.values()
        first = [
            (
                occurrence.step.phase,
                occurrence.exchange,
                party.chains(occurrence.step.phase, occurrence.exchange),
            )
            for occurrence in keys
        ]
        opened = [
            (phase, open_exchange.exchange, open_exchange.chains)
            for (phase, _), open_exchange in party.exchanges.items()
        ]
        summaries = [
            summarize_exchanges(
                recipe, phase, exchange, chains, after_labels=party.course.after_labels(phase)
            )
            for phase, exchange, chains in (*first, *opened)
        ]
        return [line for lines in summaries for line in lines] if recipe.passives else []

    @property
    def leaves(self) -> list[ExchangeSummary]:
        """The part of ``exchanges`` that this party sends."""
        mine = (
            self.party.name,
            "every party",
            *([PASSIVES] if self.party.role == "passive" else []),
        )
        return [line for line in self.exchanges if line.sender in mine]

    def connect(self, connections: Connections | None, hooks: Hooks) -> None:
        """Connects the phases to the others, and sets torch's generators to their states after
        they were made.
        """
        self.party.connect(connections, hooks)
        set_random_states(self.generators, self.party.device)

    def state(self) -> Tree:
        """Returns models, preprocessing, generators and the chains' state: all that no phase keeps
        itself.
        """
        party, prepared = self.party, self.prepared
        chains = {key: opened.chains.state() for key, opened in party.exchanges.items()}
        return {
            "models": {name: dict(model.state_dict()) for name, model in party.models.items()},
            "generators": random_states(party.device),
            "preprocessor": prepared.preprocessor.state() if prepared.preprocessor else None,
            "labels": prepared.labels.state() if prepared.labels else None,
            "data": self._data,
            "threshold": party.scores.threshold,
            "chains": {"/".join(key): state for key, state in chains.items() if state is not None},
        }

    @property
    def _data(self) -> str:
        """The fingerprint that must be equal to resume; '' for labels that are only looked up by
        id: they may be corrected.
        """
        looked_up = self.party.recipe.rows.align == "none" and self.prepared.features is None
        return "" if looked_up else self.prepared.fingerprint

    def load_state(self, tree: Tree) -> None:
        """Restores what ``state`` returned. Raises InputError if the data have changed since
        then.
        """
        party = self.party
        if tree["data"] != self._data:
            raise ChangedError(
                Code.DATA_INVALID,
                f"{self.prepared.table.source}: its rows or columns changed since the unfinished "
                "run began. Restore them, or start a new run with --fresh at the server only.",
            )
        load_models(party.models, tree)
        # A checkpoint of an earlier version has none.
        party.scores.threshold = tree.get("threshold")
        set_random_states(tree["generators"], party.device)
        for key, state in tree["chains"].items():
            phase, _, name = key.partition("/")
            party.exchanges[phase, name].chains.load_state(state)


def assemble(
    opened: OpenedParty,
    aligned: AlignedRows,
    *,
    device: torch.device = CPU,
    policy: Policy | None = None,
    spread: PutOnRanks | None = None,
    trees: TreeLimits | None = None,
    secret: int | None = None,
    label_secret: int | None = None,
) -> Assembled:
    """Prepares the rows and makes models and phases; the same result each time, whatever the
    network does.

    Args:
        opened: the party's data.
        aligned: the rows that all parties hold.
        device: for models and rows.
        policy: decides what may leave the party; None: everything may.
        spread: puts the encoder on several GPUs.
        trees: what the party file asks of trees; None: nothing.
        secret: see ``Party``.
        label_secret: from which the noise of ``task.label_epsilon`` follows; None: from the seed
            that this party's own draws follow from.

    Raises InputError.
    """
    course, name, work = opened.course, opened.name, opened.work
    prepared = work.prepare(opened, aligned)
    own = course.recipe.seed if secret is None else secret
    root = own if label_secret is None else label_secret
    # The seed of dropout.
    seed = derive_seed(own, "torch", name)
    torch.manual_seed(seed % 2**63)
    seed_generator(torch.default_generator, seed)
    features = prepared.features
    make = (
        MakeEncoder(course.recipe, name, opened.encoder, features.spec, secret)
        if features is not None
        else None
    )
    models = build_models(course, name, make, secret)
    work.begin(models)
    models = {key: model.to(device) for key, model in models.items()}
    more: dict[str, Any] = {}
    if spread is not None and features is not None and "encoder" in models:
        noted = BatchLog()
        features = replace(features, noted=noted)
        parts = parts_of(opened, aligned)
        more["encode"] = spread(models["encoder"], prepared, parts, noted)
    targets, noise = _targets(opened, prepared, aligned, root)
    party = Party(
        name=name,
        course=course,
        device=device,
        models=models,
        data=PartyData(
            splits=prepared.splits,
            features=features.to(device) if features is not None else None,
            labels=prepared.labels,
            targets=targets.to(device) if targets is not None else None,
            ids=prepared.table.ids,
            holdings=aligned.holdings,
            held=aligned.held,
            columns=prepared.cells if features is not None else None,
            weights=prepared.weights,
            label_noise=noise,
        ),
        policy=policy if policy is not None else AllowAll(),
        sent=opened.sent,
        trees=trees,
        secret=secret,
        make_encoder=make,
        **more,
    )
    phases = work.phases(party, prepared)
    return Assembled(opened, prepared, party, phases, random_states(device))


def _targets(
    opened: OpenedParty, prepared: Prepared, aligned: AlignedRows, root: int
) -> tuple[Tensor | None, Mechanism | None]:
    """Returns the targets that phases work with: in training, with the noise of
    ``task.label_epsilon``; and what that noise costs, None without it.
    """
    targets, labels, task = prepared.targets, prepared.labels, opened.recipe.task
    if task.label_epsilon is None or opened.work.job != "train" or targets is None:
        return targets, None
    assert labels is not None  # noqa: S101 - there are targets
    classes = task.classes or 2
    noise = mechanism(task.label_epsilon, opened.settings.label, labels.classes, classes)
    # A row keeps its noise when a later run aligns it, or no longer does.
    ids = [*prepared.table.ids]
    if len(targets) > len(ids) and (rest := aligned.rest_positions(opened.table)) is not None:
        ids += [opened.table.ids[row] for row in rest.tolist()]
    if len(targets) > len(ids) and opened.unaligned is not None:
        ids += opened.unaligned.ids
    root, splits = derive_seed(root, "labels"), prepared.splits
    return randomise(targets, ids, splits, noise=noise, classes=classes, root=root), noise


def parts_of(opened: OpenedParty, aligned: AlignedRows) -> list[TablePart]:
    """Returns where the rows that ``Work.prepare`` makes ready are in the party's tables."""
    parts = [TablePart(0, aligned.positions(opened.table))]
    if opened.work.job == "train":
        rest = aligned.rest_positions(opened.table)
        parts += [TablePart(0, rest)] if rest is not None else []
        parts += [TablePart(1)] if opened.unaligned is not None else []
    return parts


def check_ranks(party: Party, *, trains: bool) -> None:
    """Raises InputError if a phase or the encoder can run in only one process of a party."""
    for phase in party.course.phases if trains else ():
        why = phase.method.one_process(phase.settings)
        if why:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r} {why}, and needs "
                f"one process per party. Start {party.name} without torchrun.",
            )
    spec = party.features.spec if party.features is not None else None
    check_spread(party.models.get("encoder"), spec, party.device, party.name)
