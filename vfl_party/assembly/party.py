"""Assembles a party in three steps: open its data, align its rows, build models and phases.

    opened = open_party(recipe, name, data, encoder)    # reads data, without the network
    aligned = alignment_of(recipe).align(...)           # together with the other parties
    party = assemble(opened, aligned)                   # builds rows, models and phases

Before the party joins, ``expect_rows(opened)`` replaces ``aligned``. ``vfl-party check``, a
forecast, a trial and a run all use the same ``Assembled``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from vfl_common.config.data import DataSettings, get_unaligned_settings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.errors import ChangedError, Code, InputError
from vfl_common.stages import AggregationPlan, Job, Planned
from vfl_common.summary import ExchangeSummary
from vfl_common.text import hide_passwords
from vfl_party.align import AlignedRows, list_occurrences, make_alignment
from vfl_party.assembly.models import build_models, load_models
from vfl_party.base.devices import get_random_states, set_random_states
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.phase import Phase, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.data import Table, load_table, read_table
from vfl_party.data.inputs.made import BatchLog
from vfl_party.data.rows import Prepared, prepare
from vfl_party.models import check_combination, check_top, seed_generator
from vfl_party.outbound.chain import SentDigests
from vfl_party.outbound.chains import PASSIVES, coding_of, summarize_exchanges
from vfl_party.outbound.exchange import Connections
from vfl_party.outbound.policies import AllowAll, Policy
from vfl_party.phases.advice import check_roles, check_spelling, warn_label_taken
from vfl_party.phases.context import Hooks, MakeEncoder, Party, PartyTerms, find_privacy
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData
from vfl_party.privacy.label_noise import build_mechanism, randomise
from vfl_party.ranks import SpreadEncoder, TablePart, check_spread

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
Load = Callable[[DataSettings, bool], Table]


class PutOnRanks(Protocol):
    """The type of a function that copies an encoder to all processes of a party."""

    def __call__(
        self, encoder: nn.Module, prepared: Prepared, parts: Sequence[TablePart], noted: BatchLog
    ) -> SpreadEncoder:
        """Returns an encoder that runs in all processes.

        Args:
            encoder: The encoder to copy.
            prepared: The prepared rows.
            parts: The positions of these rows in the party's tables.
            noted: The log of how batches are made.
        """
        ...


class Work(Protocol):
    """The work of a party: training, or prediction with a trained run.

    ``job``: The name of the work. ``run_id``: The id of the trained run, or '' for training.
    ``trained_folder``: The party's folder of that run, or None.
    """

    @property
    def job(self) -> Job: ...

    @property
    def run_id(self) -> str: ...

    @property
    def trained_folder(self) -> Path | None: ...

    def prepare(self, opened: OpenedParty, aligned: AlignedRows) -> Prepared:
        """Prepares the aligned rows for encoders. Raises InputError if they are invalid."""
        ...

    def begin(self, models: dict[str, nn.Module]) -> None:
        """Loads the weights of an earlier run into the models, if there is one.

        Raises InputError if the weights do not match.
        """
        ...

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        """Builds the phases to run. Raises InputError if a phase cannot run."""
        ...


@dataclass(frozen=True)
class Training:
    """The work of training, which runs all phases of the recipe.

    ``begin_with``: Loads weights of an earlier run into the models, or None.
    """

    begin_with: Callable[[dict[str, nn.Module]], None] | None = None

    job: ClassVar[Job] = "train"
    trained_folder: ClassVar[None] = None
    run_id: ClassVar[str] = ""

    def prepare(self, opened: OpenedParty, aligned: AlignedRows) -> Prepared:
        """Prepares the aligned rows and their splits. Raises InputError if they are invalid."""
        other_rows = (aligned.rest(opened.table), opened.unaligned)
        return prepare(
            opened.recipe,
            opened.name,
            aligned.of(opened.table),
            opened.settings,
            opened.encoder,
            [table for table in other_rows if table is not None],
            aligned.division,
            tabular=opened.course.lone_phase is None,
            own_labels=opened.course.own_labels,
        )

    def begin(self, models: dict[str, nn.Module]) -> None:
        """Loads the weights of the earlier run, if there is one.

        Raises InputError if the weights do not match.
        """
        if self.begin_with is not None:
            self.begin_with(models)

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        """Builds all phases of the recipe. Raises InputError if a phase cannot run."""
        _ = prepared
        return party.course.build(party)


# Training from initial weights.
TRAINING = Training()


@dataclass(frozen=True)
class OpenedParty:
    """A party with its checked data, before it contacts other parties.

    Args:
        course: The course of the recipe's phases.
        name: The party's name in the recipe.
        settings: The settings for reading the data.
        encoder: The settings of this party's encoder.
        table: The rows to align, with labels at the active party.
        work: The work for which the rows are used.
        unaligned: The rows that only this party has.
        advice: A note for the user, which is also logged.
        sent: The digests of what this process sends, which later generations compare.
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
        """Whether the rows are divided into splits. Rows to predict are not."""
        return self.work.job == "train"

    def tell(self, show: Callable[..., None]) -> None:
        """Shows the user which rows are left out, and the advice. Both are also logged."""
        for table in (self.table, self.unaligned):
            if table is not None and table.counts is not None and table.counts.left_out:
                show("left_out", source=table.source, why=table.counts.left_out)
        if self.advice:
            show("advice", said=self.advice)


def load(data: DataSettings, with_label: bool) -> Table:
    """Reads a table. Raises InputError if it cannot be read or is invalid."""
    return load_table(data, with_label=with_label)


def open_party(
    recipe: Recipe,
    name: str,
    data: DataSettings,
    encoder: EncoderSettings,
    load: Load = load,
    work: Work = TRAINING,
) -> OpenedParty:
    """Reads the data of a party. Rows to predict are read without labels.

    Raises InputError if the recipe or the data are invalid.
    """
    course, trains = Course(recipe), work.job == "train"
    if trains:
        # The recipe is checked before a large table is read.
        course.check()
    data = data.with_id_rules(recipe.rows)
    if course.own_models():
        data = data.with_missing()
    is_active = name == recipe.active.name
    if trains and not is_active:
        check_roles(name, data)
    if is_active:
        if trains:
            check_spelling(recipe, data)
        check_combination(recipe.model.combine)
        check_top(recipe.model.top)
        data = data.keeping_rows()
    # Without an alignment every party divides its own rows, so it needs no label for a split.
    if not is_active and recipe.rows.align == "none" and data.split is not None:
        data = data.model_copy(update={"label": None})
    table = read_table(data, trains and is_active, load)
    unaligned_settings = get_unaligned_settings(data) if trains else None
    unaligned = load(unaligned_settings, False) if unaligned_settings is not None else None
    advice = warn_label_taken(name, data) if trains and not is_active else ""
    if advice:
        log.warning("%s: %s", hide_passwords(data.source), advice, extra={"event": "advice"})
    return OpenedParty(course, name, data, encoder, table, work, unaligned, advice)


def expect_rows(opened: OpenedParty) -> AlignedRows:
    """Returns the rows that a party expects to train on, before it contacts other parties.

    At most these are all of its rows.
    """
    return make_alignment(opened.recipe, divides=opened.divides).get_expected(opened.table)


@dataclass
class Assembled:
    """A party that is ready to run, with rows, models and phases. It needs no network.

    ``generators``: The states of torch's generators after models and phases were built.
    """

    opened: OpenedParty
    prepared: Prepared
    party: Party
    phases: Sequence[Phase]
    generators: dict[str, Tensor] = field(repr=False)

    @property
    def plan(self) -> list[Planned]:
        """The phases in their order. The labels of checkpoints refer to this plan."""
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
        """The aggregations of weights by the server in the phases."""
        rounds = {phase.name: phase.rounds for phase in self.phases}
        recipe, plans = self.party.recipe, []
        for (phase, _), opened in self.party.exchanges.opened.items():
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
        """The active party's JSON about differential privacy for the summary, or ''."""
        private = find_privacy(self.party) if self.party.role == "active" else None
        return private.report().model_dump_json() if private is not None else ""

    @property
    def exchanges(self) -> list[ExchangeSummary]:
        """The exchanges of the phases with their chains. Empty if there is no passive party."""
        party, recipe = self.party, self.party.recipe
        aligning = list_occurrences(recipe, len(self.prepared.table), divides=self.opened.divides)
        occurrences = {
            (occurrence.step.phase, occurrence.exchange.name): occurrence for occurrence in aligning
        }.values()
        alignment_exchanges = [
            (
                occurrence.step.phase,
                occurrence.exchange,
                party.exchanges.make_chains(occurrence.step.phase, occurrence.exchange),
            )
            for occurrence in occurrences
        ]
        phase_exchanges = [
            (phase, open_exchange.exchange, open_exchange.chains)
            for (phase, _), open_exchange in party.exchanges.opened.items()
        ]
        summaries = [
            summarize_exchanges(
                recipe, phase, exchange, chains, after_labels=party.course.after_labels(phase)
            )
            for phase, exchange, chains in (*alignment_exchanges, *phase_exchanges)
        ]
        return [line for lines in summaries for line in lines] if recipe.passives else []

    @property
    def leaves(self) -> list[ExchangeSummary]:
        """The directions of ``exchanges`` in which this party sends."""
        own_senders = (
            self.party.name,
            "every party",
            *([PASSIVES] if self.party.role == "passive" else []),
        )
        return [line for line in self.exchanges if line.sender in own_senders]

    def connect(self, connections: Connections | None, hooks: Hooks) -> None:
        """Connects the phases to the other parties, and restores the states of torch's generators.

        The generators get the states that they had after the phases were built.
        """
        party, record = self.party, connections.record if connections is not None else None
        party.hooks = hooks
        party.exchanges.connections.connect(connections)
        if record is not None and (label_noise := party.rows.data.label_noise) is not None:
            receivers = [other.name for other in party.recipe.parties if other.name != party.name]
            record.spends(party.course.phases[0].name, label_noise.text, 1, "labels", receivers)
        set_random_states(self.generators, self.party.device)

    def state(self) -> Tree:
        """Returns the state for a checkpoint that does not belong to a phase.

        It has models, preprocessing, generators and the states of chains.
        """
        party, prepared = self.party, self.prepared
        chains = {key: opened.chains.state() for key, opened in party.exchanges.opened.items()}
        return {
            "models": {name: dict(model.state_dict()) for name, model in party.models.items()},
            "generators": get_random_states(party.device),
            "preprocessor": prepared.preprocessor.state() if prepared.preprocessor else None,
            "labels": prepared.labels.state() if prepared.labels else None,
            "data": self._data_fingerprint,
            "threshold": party.scores.threshold,
            "chains": {"/".join(key): state for key, state in chains.items() if state is not None},
        }

    @property
    def _data_fingerprint(self) -> str:
        """The fingerprint of the data, which must be the same when a run is resumed.

        '' for labels that are only looked up by id, because these may be corrected.
        """
        looked_up = self.party.recipe.rows.align == "none" and self.prepared.features is None
        return "" if looked_up else self.prepared.fingerprint

    def load_state(self, tree: Tree) -> None:
        """Restores the result of ``state``. Raises InputError if the data have changed."""
        party = self.party
        if tree["data"] != self._data_fingerprint:
            raise ChangedError(
                Code.DATA_INVALID,
                f"{self.prepared.table.source}: its rows or columns changed since the unfinished "
                "run began. Restore them, or start a new run with --fresh at the server only.",
            )
        load_models(party.models, tree)
        # A checkpoint of an earlier version has no threshold.
        party.scores.threshold = tree.get("threshold")
        set_random_states(tree["generators"], party.device)
        for key, state in tree["chains"].items():
            phase, _, name = key.partition("/")
            party.exchanges.opened[phase, name].chains.load_state(state)


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
    """Prepares the rows and builds models and phases. The same arguments give the same result.

    Args:
        opened: The party with its data.
        aligned: The aligned rows.
        device: The device for models and rows.
        policy: The policy that decides what may be sent. Default: everything.
        spread: Copies the encoder to several GPUs, or None.
        trees: The limits of the party file for trees, or None.
        secret: The secret seed; see ``Party``.
        label_secret: The seed of the noise of ``task.label_epsilon``. Default: ``secret``, or else
            the recipe's seed.

    Raises InputError if the data, the recipe or a plug-in is invalid.
    """
    course, name, work = opened.course, opened.name, opened.work
    prepared = work.prepare(opened, aligned)
    own_seed = course.recipe.seed if secret is None else secret
    label_seed = own_seed if label_secret is None else label_secret
    # Dropout uses torch's default generator.
    seed = derive_seed(own_seed, "torch", name)
    torch.manual_seed(seed % 2**63)
    seed_generator(torch.default_generator, seed)
    features = prepared.features
    make_encoder = (
        MakeEncoder(course.recipe, name, opened.encoder, features.spec, secret)
        if features is not None
        else None
    )
    models = build_models(course, name, make_encoder, secret)
    work.begin(models)
    models = {key: model.to(device) for key, model in models.items()}
    encode: SpreadEncoder | None = None
    if spread is not None and features is not None and "encoder" in models:
        batch_log = BatchLog()
        features = replace(features, noted=batch_log)
        parts = parts_of(opened, aligned)
        encode = spread(models["encoder"], prepared, parts, batch_log)
    targets, noise = _make_targets(opened, prepared, aligned, label_seed)
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
            ids=aligned.ids if aligned.has_own_ids else prepared.table.ids,
            key_N=prepared.table.key_N,
            holdings=aligned.holdings,
            held=aligned.held,
            columns=prepared.cells if features is not None else None,
            weights=prepared.weights,
            label_noise=noise,
        ),
        terms=PartyTerms(
            policy if policy is not None else AllowAll(), opened.sent, trees=trees, secret=secret
        ),
        make_encoder=make_encoder,
        encode=encode,
    )
    phases = work.phases(party, prepared)
    return Assembled(opened, prepared, party, phases, get_random_states(device))


def _make_targets(
    opened: OpenedParty, prepared: Prepared, aligned: AlignedRows, label_seed: int
) -> tuple[Tensor | None, Mechanism | None]:
    """Returns the targets for the phases, and the privacy cost of their noise or None.

    In training the targets have the noise of ``task.label_epsilon``.
    """
    targets, labels, task = prepared.targets, prepared.labels, opened.recipe.task
    if task.label_epsilon is None or opened.work.job != "train" or targets is None:
        return targets, None
    assert labels is not None  # noqa: S101 - there are targets
    classes = task.classes or 2
    noise = build_mechanism(task.label_epsilon, opened.settings.label, labels.classes, classes)
    # A row has the same noise in every run, whether or not the run aligns it.
    ids = [*prepared.table.ids]
    if len(targets) > len(ids) and (unaligned_rows := aligned.find_rest(opened.table)) is not None:
        ids += [opened.table.ids[row] for row in unaligned_rows.tolist()]
    if len(targets) > len(ids) and opened.unaligned is not None:
        ids += opened.unaligned.ids
    label_seed, splits = derive_seed(label_seed, "labels"), prepared.splits
    return randomise(targets, ids, splits, noise=noise, classes=classes, root=label_seed), noise


def parts_of(opened: OpenedParty, aligned: AlignedRows) -> list[TablePart]:
    """Returns the positions of the prepared rows in the party's tables."""
    parts = [TablePart(0, aligned.positions(opened.table))]
    if opened.work.job == "train":
        unaligned_rows = aligned.find_rest(opened.table)
        parts += [TablePart(0, unaligned_rows)] if unaligned_rows is not None else []
        parts += [TablePart(1)] if opened.unaligned is not None else []
    return parts


def check_ranks(party: Party, *, trains: bool) -> None:
    """Raises InputError if a phase or the encoder can run in only one process of a party."""
    for phase in party.course.phases if trains else ():
        why = phase.facts.one_process
        if why:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: a phase of kind {phase.kind!r} {why}, and needs "
                f"one process per party. Start {party.name} without torchrun.",
            )
    spec = party.rows.features.spec if party.rows.features is not None else None
    check_spread(party.models.get("encoder"), spec, party.device, party.name)
