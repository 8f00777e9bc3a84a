"""A party, assembled in one place: open its data, align its rows, assemble models and phases.

    opened  = open_party(recipe, name, data, encoder)           # data; no network
    aligned = alignment_of(recipe).align(…)                     # with the others
    party   = assemble(opened, aligned, …)                      # rows, models, phases, plan: pure

`vfl-party check`, a forecast, a study's trial and a run work with the same `Assembled`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from vfl_common.config.data import DataSettings, shown, unaligned_of
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.errors import ChangedError, Code, InputError
from vfl_common.stages import AggregationPlan, Planned
from vfl_common.summary import ExchangeSummary
from vfl_party.align import Aligned, alignment_of
from vfl_party.base.phase import Phase, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.data import Table, load_table, read_table
from vfl_party.data.rows import Prepared, prepare
from vfl_party.methods import build_phases, handed_on, own_of, upper_of, with_own_passes
from vfl_party.models import InputSpec, begin, build_top, check_encoder, combined_size, seeded
from vfl_party.outbound.chains import PASSIVES, coding_of, summarised
from vfl_party.outbound.exchange import Ways
from vfl_party.outbound.policies import Policy
from vfl_party.outbound.policies.allow_all import AllowAll
from vfl_party.outbound.sent import SentBefore
from vfl_party.phases.advice import label_taken
from vfl_party.phases.context import Hooks, MakeEncoder, Party
from vfl_party.ranks import check_spread

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
Load = Callable[[DataSettings, bool], Table]
Spread = Callable[[nn.Module, InputSpec], Callable[..., Tensor]]


@dataclass(frozen=True)
class Opened:
    """A party's data, read and checked, before any contact with the others.

    ``table``: the rows to align, with labels at the active party; ``unaligned``: rows that only
    this party has. ``divides``: false for rows to predict, which have no splits. ``advice``: a note
    for the person here, which the log has. ``sent``: what this process sends, for the generations
    to come.
    """

    recipe: Recipe
    name: str
    settings: DataSettings
    encoder: EncoderSettings
    table: Table
    unaligned: Table | None = None
    divides: bool = True
    advice: str = ""
    sent: SentBefore = field(default_factory=SentBefore, compare=False)

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
    *,
    labels: bool = True,
) -> Opened:
    """Reads the data of a party. ``labels``: false for rows to predict. Raises InputError."""
    data = data.ruled(recipe.rows.id_rules)
    if own_of(recipe):
        data = data.with_missing()
    active = name == recipe.active.name
    if active:
        data = data.keeping_rows()
    # Every party divides its own rows.
    if not active and recipe.rows.align == "none" and data.split is not None:
        data = data.model_copy(update={"label": None})
    table = read_table(data, labels and active, load)
    more = unaligned_of(data) if labels else None
    unaligned = load(more, False) if more is not None else None
    advice = label_taken(name, data) if labels and not active else ""
    if advice:
        log.warning("%s: %s", shown(data.source), advice, extra={"event": "advice"})
    return Opened(recipe, name, data, encoder, table, unaligned, labels, advice)


def expected_rows(opened: Opened) -> Aligned:
    """Returns the rows that a party expects to train on, before any contact with the others: at
    most all of its own.
    """
    return alignment_of(opened.recipe, divides=opened.divides).expected(opened.table)


class Work(Protocol):
    """The purpose that a party is assembled for: training, or prediction with a trained run.

    ``run_id``: the trained run; '' for training.
    """

    @property
    def run_id(self) -> str: ...

    def prepare(self, opened: Opened, aligned: Aligned) -> Prepared:
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

    recipe: Recipe
    begin_with: Callable[[dict[str, nn.Module]], None] | None = None
    run_id: str = ""

    def prepare(self, opened: Opened, aligned: Aligned) -> Prepared:
        table = aligned.of(opened.table)
        own = [each for each in (aligned.rest(opened.table), opened.unaligned) if each is not None]
        return prepare(
            self.recipe, opened.name, table, opened.settings, opened.encoder, own, aligned.division
        )

    def begin(self, models: dict[str, nn.Module]) -> None:
        if self.begin_with is not None:
            self.begin_with(models)

    def phases(self, party: Party, prepared: Prepared) -> Sequence[Phase]:
        _ = prepared
        return build_phases(self.recipe, party)


@dataclass
class Assembled:
    """A party ready to run: rows, models, phases, and what follows from them. It needs no network.

    ``generator``: the state of torch's generator after models and phases were made.
    """

    opened: Opened
    prepared: Prepared
    party: Party
    phases: Sequence[Phase]
    generator: Tensor = field(repr=False)

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
        recipe, found = self.party.recipe, []
        for (phase, _), each in self.party.exchanges.items():
            if each.exchange.asks == "server":
                up, down = (
                    coding_of(recipe, phase, each.exchange, direction)
                    for direction in ("up", "down")
                )
                spec = each.chains.up.before_codec(each.exchange.up.spec())
                found.append(
                    AggregationPlan(phase, rounds[phase], spec, each.exchange.passive, up, down)
                )
        return tuple(found)

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
        keys = {(each.step.phase, each.exchange.name): each for each in aligning}.values()
        first = [
            (each.step.phase, each.exchange, party.chains(each.step.phase, each.exchange))
            for each in keys
        ]
        opened = [
            (phase, each.exchange, each.chains) for (phase, _), each in party.exchanges.items()
        ]
        found = [
            summarised(recipe, phase, each, chains) for phase, each, chains in (*first, *opened)
        ]
        return [line for lines in found for line in lines] if recipe.passives else []

    @property
    def leaves(self) -> list[ExchangeSummary]:
        """The part of ``exchanges`` that this party sends."""
        mine = (
            self.party.name,
            "every party",
            *([PASSIVES] if self.party.role == "passive" else []),
        )
        return [line for line in self.exchanges if line.sender in mine]

    def connect(self, ways: Ways | None, hooks: Hooks) -> None:
        """Connects the phases to the others, and sets torch's generator to its state after they
        were made.
        """
        self.party.ways = ways
        self.party.tick, self.party.lenient, self.party.show = hooks.tick, hooks.lenient, hooks.show
        torch.set_rng_state(self.generator)

    def state(self) -> Tree:
        """Returns models, preprocessing, generators and the chains' state: all that no phase keeps
        itself.
        """
        party, prepared = self.party, self.prepared
        generators: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
        if party.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(party.device)
        chains = {key: each.chains.state() for key, each in party.exchanges.items()}
        return {
            "models": {name: dict(model.state_dict()) for name, model in party.models.items()},
            "generators": generators,
            "preprocessor": prepared.preprocessor.state() if prepared.preprocessor else None,
            "labels": prepared.labels.state() if prepared.labels else None,
            "data": self._data,
            "chains": {"/".join(key): state for key, state in chains.items() if state is not None},
        }

    @property
    def _data(self) -> str:
        """What must be the same to resume; '' for labels that are only looked up by id: they may be
        corrected.
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
                f"{self.prepared.table.source}: its rows or columns are not those that the "
                "unfinished run began with; "
                "restore them, or begin a new run with --fresh at the server alone",
            )
        load_models(party.models, tree)
        torch.set_rng_state(tree["generators"]["cpu"])
        if party.device.type == "cuda" and "cuda" in tree["generators"]:
            torch.cuda.set_rng_state(tree["generators"]["cuda"], party.device)
        for key, state in tree["chains"].items():
            phase, _, name = key.partition("/")
            party.exchanges[phase, name].chains.load_state(state)


def assemble(
    opened: Opened,
    aligned: Aligned,
    work: Work | None = None,
    *,
    device: torch.device = CPU,
    policy: Policy | None = None,
    spread: Spread | None = None,
    trees: TreeLimits | None = None,
    secret: int | None = None,
) -> Assembled:
    """Prepares the rows and makes models and phases; the same result each time, whatever the
    network does.

    Args:
        opened: the party's data.
        aligned: the rows that all parties hold.
        work: training or prediction; None: training from the beginning.
        device: for models and rows.
        policy: decides what may leave the party; None: everything may.
        spread: puts the encoder on several GPUs.
        trees: what the party file asks of trees; None: nothing.
        secret: see ``Party``.

    Raises InputError.
    """
    recipe, name = opened.recipe, opened.name
    work = work if work is not None else Training(recipe)
    prepared = work.prepare(opened, aligned)
    # Of dropout.
    seed = derive_seed(recipe.seed if secret is None else secret, "torch", name)
    torch.manual_seed(seed % 2**63)
    begin(torch.default_generator, seed)
    features = prepared.features
    make = (
        MakeEncoder(recipe, name, opened.encoder, features.spec, secret)
        if features is not None
        else None
    )
    models = build_models(recipe, name, make, secret)
    work.begin(models)
    party = Party(
        name=name,
        recipe=recipe,
        device=device,
        models={key: model.to(device) for key, model in models.items()},
        features=features.to(device) if features is not None else None,
        labels=prepared.labels,
        targets=prepared.targets.to(device) if prepared.targets is not None else None,
        splits=prepared.splits,
        ids=prepared.table.ids,
        holdings=aligned.holdings,
        make_encoder=make,
        columns=prepared.cells if features is not None else None,
        policy=policy if policy is not None else AllowAll(),
        sent=opened.sent,
        trees=trees,
        secret=secret,
    )
    if spread is not None and features is not None and "encoder" in party.models:
        party.encode = spread(party.models["encoder"], features.spec)
    phases = work.phases(party, prepared)
    return Assembled(opened, prepared, party, phases, torch.get_rng_state())


def check_ranks(party: Party, *, trains: bool) -> None:
    """Raises InputError if a phase or the encoder can run in only one process of a party."""
    own = with_own_passes(party.recipe) if trains else None
    if own is not None:
        text = (
            f"recipe: phases: {own.name}: a phase of kind {own.kind!r} runs in only one "
            "process of a party"
        )
        raise InputError(Code.CONFIG_INVALID, f"{text}; start {party.name} without torchrun")
    spec = party.features.spec if party.features is not None else None
    check_spread(party.models.get("encoder"), spec, party.device, party.name)


def encoder_settings(recipe: Recipe, name: str, own: EncoderSettings | None) -> EncoderSettings:
    """Returns the party file's encoder, else the recipe's for this party, else the recipe's for
    all.

    Raises InputError if it is a plug-in's that is not installed here, or has other settings.
    """
    place = recipe.party(name)
    found, where = recipe.model.encoder, "recipe: model.encoder"
    if own is not None:
        found, where = own, f"party {name}: encoder"
    elif place is not None and place.encoder is not None:
        found, where = place.encoder, f"recipe: parties.{name}.encoder"
    if place is None or place.features:
        check_encoder(found, where)
    return found


def build_models(
    recipe: Recipe, name: str, make_encoder: MakeEncoder | None, secret: int | None = None
) -> dict[str, nn.Module]:
    """Makes this party's models on the CPU, with initial weights that follow from a seed and the
    party's name.

    ``make_encoder``: None for an active party with labels only. ``secret``: see ``Party``. The
    phases share the one encoder. A method with a model of its own needs neither encoder nor top.
    """
    seed = recipe.seed if secret is None else secret
    models, size = own_of(recipe), recipe.model.embedding_size
    if models:
        return models
    if make_encoder is not None:
        models["encoder"] = handed_on(recipe, make_encoder)
    if name == recipe.active.name:
        models |= upper_of(recipe, seed)
        parts = len(recipe.passives) + recipe.active.features
        width = size if "tail" in models else combined_size(recipe.model.combine, parts, size)
        with seeded(derive_seed(seed, "init", name, "top")):
            models["top"] = build_top(recipe.model.top, width, recipe.task.outputs)
    return models


def load_models(models: dict[str, nn.Module], tree: Tree) -> None:
    """Loads weights from a job's state. Raises InputError if they do not fit the models."""
    try:
        for name, model in models.items():
            model.load_state_dict(tree["models"][name])
    except (KeyError, RuntimeError):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            "the checkpoint holds other models than the recipe and the data produce; use "
            "those of the trained run",
        ) from None


def load_encoder(models: dict[str, nn.Module], tree: Tree, run_id: str, tower: str | None) -> None:
    """Loads only the encoder of another run's job: this run makes its own preprocessing and top
    model.

    ``tower``: loads only this tower, of an encoder that has two. Raises InputError if it does not
    fit.
    """
    try:
        if "tail" in models:
            models["tail"].load_state_dict(tree["models"]["tail"])
        if "bottom" in models:
            models["bottom"].load_state_dict(tree["models"]["encoder"])
        if "encoder" in models:
            weights = tree["models"]["encoder"]
            if tower is not None:
                prefix = f"{tower}."
                weights = {
                    name[len(prefix) :]: each
                    for name, each in weights.items()
                    if name.startswith(prefix)
                }
            models["encoder"].load_state_dict(weights)
    except (KeyError, RuntimeError):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"recipe: start.run: the encoder of {run_id} differs from what this recipe and "
            "data produce; give both "
            "recipes the same model and columns, and start.phases that run's phases",
        ) from None
