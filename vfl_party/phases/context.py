"""Defines the context that a party gives to its phases: models, rows, connections and settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.bundle import PROTOCOL, Hub, Link, StepKey
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_party.base.devices import copy_index
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.phase import RoundReport
from vfl_party.base.plugins import describe_failure
from vfl_party.base.seeds import HeldRows, Rows, derive_seed
from vfl_party.base.step_timing import Clock
from vfl_party.data import Features, Labels
from vfl_party.data.inputs.weights import row_weights
from vfl_party.models import InputSpec, build_checked_encoder, forward, seed_torch, width_of
from vfl_party.models.row_blocks import Blocks
from vfl_party.models.training import Precision
from vfl_party.outbound.chain import Chains, SentDigests
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Occurrence, Role
from vfl_party.outbound.exchange import Answering, Asking, Connections
from vfl_party.outbound.policies import AllowAll, Policy
from vfl_party.privacy.accountant import Spending
from vfl_party.privacy.plan import PrivacyPlan
from vfl_party.record.recorder import Recorder

if TYPE_CHECKING:
    from vfl_party.phases.course import Course

# The columns of a table: numbers [N, F], codes of categories [N, K], and the names of all columns.
Columns = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]


@dataclass(frozen=True)
class MakeEncoder:
    """Makes encoders of a party's kind for its inputs, on the CPU.

    ``secret``: See ``Party``.
    """

    recipe: Recipe
    party: str
    settings: EncoderSettings
    spec: InputSpec
    secret: int | None = None

    @property
    def width(self) -> int:
        """The width of the embeddings, the encoder's output."""
        return width_of(self.recipe, self.party, self.settings, self.spec)

    def __call__(self, label: str, *, shared: bool = False, width: int | None = None) -> nn.Module:
        """Makes an encoder. Each ``label`` has its own initial weights. ``shared``: Whether the
        weights are the same at every party.

        ``width``: The width of its output; None for ``self.width``. Raises InputError if the
        encoder does not fit the party's rows.
        """
        root = self.recipe.seed if shared or self.secret is None else self.secret
        with seed_torch(derive_seed(root, "init", *((label,) if shared else (self.party, label)))):
            return build_checked_encoder(
                self.settings, self.spec, width or self.width, party=self.party
            )


@runtime_checkable
class OnSeveral(Protocol):
    """An encoder that runs in several processes of a party; see ``Party.through``."""

    def through(self, encoder: nn.Module, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Passes batches through the encoder. Returns the embeddings [B, D] of each batch."""
        ...


def _raise_no_encoder(*_inputs: Tensor) -> Tensor:
    raise InputError(
        Code.DATA_INVALID, "a party without features has no encoder. Give it features."
    )


def _ignore_tick(_phase: str, _round: int, _rounds: int, _batch: int, _batches: int) -> None:
    return


@dataclass(frozen=True)
class Hooks:
    """The callbacks of a party while a phase runs.

    ``tick``: Called after each step with (phase, finished rounds, rounds, finished batches,
    batches). ``lenient``: Called by a phase at the active party once all parties have reached the
    phase, with whether it continues without a lost party. ``show``: Reports an event, which is
    already in the log, to the user. ``settled``: Called within a round, with the round's report,
    once the round changes the phase's state no more and before the other parties can continue
    without this party. Then the checkpoint from which they may resume must be on the disk.
    """

    tick: Callable[[str, int, int, int, int], None] = field(default=_ignore_tick)
    lenient: Callable[[bool], None] = field(default=lambda _on: None)
    show: Callable[..., None] = field(default=lambda _event, **_facts: None)
    settled: Callable[[RoundReport], None] = field(default=lambda _report: None)


@dataclass(frozen=True)
class PartyData:
    """The rows of a party, prepared for phases. Row numbers are positions in the canonical order of
    the aligned ids.

    Args:
        splits: {name: row numbers}, see ``vfl_party.base.seeds.split_rows``. ``local`` may end with
            rows that only this party has. If a phase learns from such rows, ``own`` contains the
            labelled ones.
        features: The encoders' inputs; None at an active party with labels only.
        labels: The classes, or the scale of a regression; None at a passive party.
        targets: The encoded labels of all rows, at the active party in training.
        ids: The ids of the aligned rows in ``splits``.
        holdings: {passive party: {split: number of rows}} if each party has other rows
            (``rows.align = "none"``); empty otherwise.
        columns: Returns the aligned rows' cells as in the table, see ``Prepared.cells``; None
            without features.
        weights: The column of ``data.weight`` at the active party, [N], as in the table.
        label_noise: The privacy cost of the noisy labels; None without ``task.label_epsilon``.
    """

    splits: Mapping[str, Rows]
    features: Features | None = None
    labels: Labels | None = None
    targets: Tensor | None = None
    ids: Sequence[str] = ()
    holdings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: HeldRows | None = None
    columns: Callable[[], Columns] | None = None
    weights: Tensor | None = None
    label_noise: Mechanism | None = None


def _forward(model: nn.Module, precision: Precision, *inputs: Tensor) -> Tensor:
    """Passes inputs through a model in the recipe's precision."""
    if precision == "float32":
        output: Tensor = model(*inputs)
        return output
    return forward(model, *inputs, precision=precision)


class _CheckedEncoder:
    """A party's encoder on one device. Checks the encoder's output, because the encoder may be a
    plug-in.
    """

    def __init__(self, encoder: nn.Module, precision: Precision, party: str) -> None:
        self._encoder, self._precision, self._party = encoder, precision, party
        # The shape of one embedding, once the first embeddings are known.
        self._width: tuple[int, ...] = ()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Passes inputs through the encoder. Raises InputError if it fails."""
        try:
            z = _forward(self._encoder, self._precision, *inputs)
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.MODEL_INVALID,
                f"the encoder of {self._party}: failed {describe_failure(error)}. "
                "Correct the encoder.",
            ) from error
        rows, shape = inputs[0].shape[0], tuple(z.shape) if isinstance(z, Tensor) else ()
        self._width = self._width or shape[-1:]
        if shape != (rows, *self._width):
            result = f"shape {list(shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise InputError(
                Code.MODEL_INVALID,
                f"the encoder of {self._party}: must give a tensor of shape "
                f"{[rows, *self._width]} for {rows} rows (got {result}). Correct the encoder.",
            )
        return z


@dataclass
class Scores:
    """The settings with which a party computes scores. Training, or the check of a trained model,
    sets them.

    ``threshold``: The probability above which a row is predicted positive, if a rule of the recipe
    has chosen it. ``blocks``: {model: the blocks in which it computes rows}. A model that is
    missing here uses the default blocks.
    """

    threshold: float | None = None
    blocks: Mapping[str, Blocks] = field(default_factory=dict)


@dataclass
class Party:
    """A party in one generation of a run: the object through which phases use its models, rows and
    connections.

    Args:
        name: The party's name in the recipe.
        course: The recipe with its phases and the settings that follow from them.
        device: The device of models and rows.
        models: {name: model}: ``encoder`` (if the party has features), and at the active party
            ``top`` and the models of ``Method.upper``. Or the models of ``Method.own_models``.
        data: The party's rows.
        policy: Decides what this party may send.
        sent: Digests of the values that were sent in earlier generations.
        trees: The party file's limits for trees; None for no limits.
        secret: The root of the seeds that only this party can derive. None to derive all seeds from
            the recipe's seed.
        make_encoder: Makes encoders, for methods that train more than one encoder; None without
            features.
        encode: Called with the inputs of a batch, returns the encoder's embeddings, float32 [B, D],
            in the recipe's precision and computed on all of the party's GPUs. By default, runs
            ``models["encoder"]`` on one device.
        others: {other party: its ``Party``} in a forecast that has all parties' data; empty
            otherwise.
        exchanges: {(phase, exchange's name): this party's side}, for the exchanges that the phases
            have opened.

    ``connections``: The links and the hub of this generation; None before ``connect``. ``hooks``:
    The callbacks while a phase runs. ``scores``: The settings with which the party computes scores.
    """

    name: str
    course: Course
    device: torch.device
    models: dict[str, nn.Module]
    data: PartyData
    policy: Policy = field(default_factory=AllowAll)
    sent: SentDigests = field(default_factory=SentDigests)
    trees: TreeLimits | None = None
    secret: int | None = None
    make_encoder: MakeEncoder | None = None
    encode: Callable[..., Tensor] = field(default=_raise_no_encoder)
    others: Mapping[str, Party] = field(default_factory=dict)
    exchanges: dict[tuple[str, str], Asking | Answering] = field(default_factory=dict)
    connections: Connections | None = field(default=None, init=False)
    hooks: Hooks = field(default_factory=Hooks, init=False)
    scores: Scores = field(default_factory=Scores, init=False)

    def __post_init__(self) -> None:
        if self.encode is _raise_no_encoder and "encoder" in self.models:
            precision = self.recipe.model.precision
            self.encode = _CheckedEncoder(self.models["encoder"], precision, self.name)

    # -- the run
    # ----------------------------------------------------------------------

    def connect(self, connections: Connections | None, hooks: Hooks) -> None:
        """Connects the phases to the other parties and to the program that runs the phases."""
        self.connections, self.hooks = connections, hooks
        if self.record is not None and (label_noise := self.data.label_noise) is not None:
            receivers = [party.name for party in self.recipe.parties if party.name != self.name]
            self.record.spends(self.course.phases[0].name, label_noise.text, 1, "labels", receivers)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.course.recipe

    def tick(self, phase: str, round_: int, rounds: int, batch: int, batches: int) -> None:
        """See ``Hooks``."""
        self.hooks.tick(phase, round_, rounds, batch, batches)

    def lenient(self, on: bool) -> None:
        """See ``Hooks``."""
        self.hooks.lenient(on)

    def settled(self, report: RoundReport) -> None:
        """See ``Hooks``."""
        self.hooks.settled(report)

    def show(self, event: str, **facts: Any) -> None:
        """See ``Hooks``."""
        self.hooks.show(event, **facts)

    # -- what the phases exchange
    # ----------------------------------------------------------------------

    @property
    def encodes_here(self) -> bool:
        """Whether ``encode`` runs the encoder on one device, without other processes."""
        return isinstance(self.encode, _CheckedEncoder)

    def through(self, encoder: nn.Module, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Passes batches of the same size through an encoder of the party's kind, on all of the
        party's GPUs. The encoder may be an additional one that a phase trains. Returns the
        embeddings of each batch, float32 [B, D]. ``batches``: The encoder's arguments, which must
        come from the party's features or an augmentation.
        """
        if isinstance(self.encode, OnSeveral):
            return self.encode.through(encoder, *batches)
        return [encoder(*inputs) for inputs in batches]

    @property
    def own_seed(self) -> int:
        """The root of the seeds for all random values that only this party draws: weights, targets,
        orders, views. It may be secret.
        """
        return self.recipe.seed if self.secret is None else self.secret

    @property
    def role(self) -> Role:
        """The party's role in the recipe."""
        return "active" if self.name == self.recipe.active.name else "passive"

    @property
    def link(self) -> Link | None:
        """See ``Connections``."""
        return self.connections.link if self.connections is not None else None

    @property
    def hub(self) -> Hub | None:
        """See ``Connections``."""
        return self.connections.hub if self.connections is not None else None

    @property
    def server(self) -> Link | None:
        """See ``Connections``."""
        return self.connections.server if self.connections is not None else None

    @property
    def clock(self) -> Clock:
        """See ``Connections``."""
        return self.connections.clock if self.connections is not None else Clock()

    @property
    def protocol(self) -> int:
        """See ``Connections``."""
        return self.connections.protocol if self.connections is not None else PROTOCOL

    @property
    def record(self) -> Recorder | None:
        """See ``Connections``."""
        return self.connections.record if self.connections is not None else None

    def chains(self, phase: str, exchange: Exchange) -> Chains:
        """Makes the chains of an exchange of ``phase``: transforms, this party's policy, the
        phase's codec.

        Raises InputError if the recipe names an unknown transform or codec, or if the policy
        refuses.
        """
        return make_chains(
            self.recipe, phase, exchange, self.role, self.policy, self.name, self.sent
        )

    def asking(self, phase: str, exchange: Exchange, **sizes: int) -> Asking:
        """Opens this party's asking side of an exchange. ``sizes``: The sizes that are the same at
        every step.

        Raises as ``chains``.
        """
        peer = self.recipe.server if exchange.asks == "server" else self.recipe.active.name
        asking = Asking(
            exchange, phase, self.chains(phase, exchange), self, peer, self.device, sizes
        )
        self.exchanges[phase, exchange.name] = asking
        return asking

    def answering(
        self, phase: str, exchange: Exchange, **sizes: int | Mapping[str, int]
    ) -> Answering:
        """Opens the active party's answering side of an exchange; see ``asking``. A size that may
        differ between passive parties is a dict {passive party: its size}.
        """
        answering = Answering(
            exchange, phase, self.chains(phase, exchange), self, self.device, sizes
        )
        self.exchanges[phase, exchange.name] = answering
        return answering

    def occurrences(self, exchange: Exchange, step: StepKey, **sizes: int) -> list[Occurrence]:
        """Returns the occurrences of an exchange of embeddings at ``step``, for a forecast: one for
        all passive parties, or one for each if their ``widths`` differ.
        """
        if len(set(self.widths.values())) < 2:
            width = next(iter(self.widths.values()), self.embedding_size)
            return [Occurrence.of(exchange, step, **sizes, width=width)]
        return [
            replace(Occurrence.of(exchange, step, **sizes, width=width), party=name)
            for name, width in self.widths.items()
        ]

    def joint_occurrences(self, exchange: Exchange, step: StepKey, rows: Rows) -> list[Occurrence]:
        """Returns the occurrences of an exchange of embeddings of ``rows``, one for each passive
        party that has some of the rows. ``rows``: Row numbers that are common to all parties.
        """
        sizes = self.sizes_of(rows)
        if sizes is None:
            return self.occurrences(exchange, step, rows=len(rows))
        return [
            replace(
                Occurrence.of(exchange, step, **party_sizes, width=self.widths[name]), party=name
            )
            for name, party_sizes in sizes.items()
        ]

    @property
    def bound(self) -> str:
        """The reason why a forecast's sizes are upper bounds; '' if they are exact."""
        unknown = self.recipe.rows.partial and self.data.held is None
        return (
            "it is not known which party has which rows, so the bytes are for all parties with "
            "all rows" * unknown
        )

    def unhurried(self) -> None:
        """Lets the next exchange wait as long as the peers are connected, because they may still be
        computing alone.
        """
        for connection in (self.link, self.hub):
            if connection is not None:
                connection.unhurried()

    # -- models and rows
    # ----------------------------------------------------------------------

    @property
    def joint(self) -> dict[str, nn.Module]:
        """The models that are used together with the other parties' models: all but ``solo``."""
        return {name: model for name, model in self.models.items() if name != "solo"}

    @property
    def embedding_size(self) -> int:
        """The width of this party's embeddings."""
        make = self.make_encoder
        return self.recipe.embedding_size(self.name) if make is None else make.width

    @cached_property
    def widths(self) -> dict[str, int]:
        """{passive party: the width of its embeddings}."""
        return {
            party.name: self.recipe.embedding_size(party.name) for party in self.recipe.passives
        }

    def outputs(self, z_BD: Tensor) -> Tensor:
        """Returns the top model's outputs for combined embeddings, float32 [B, O], in the recipe's
        precision. Raises InputError if it fails.
        """
        try:
            return _forward(self.models["top"], self.recipe.model.precision, z_BD)
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.MODEL_INVALID,
                f"the top model of {self.name}: failed {describe_failure(error)}. "
                "Correct the model.",
            ) from error

    @cached_property
    def privacy(self) -> PrivacyPlan | None:
        """The privacy budget of the phases with ``dp``; None if no phase has ``dp``. Raises
        InputError if the phases do not fit together.
        """
        train = self.data.splits.get("train")
        return self.course.privacy(len(train)) if train is not None else None

    def need_privacy(self) -> PrivacyPlan:
        """Returns the privacy budget of the phases with ``dp``. Raises InternalError if there is
        none.
        """
        if self.privacy is None:
            raise InternalError(
                f"{self.name}: a phase with dp was made without a plan of its budget"
            )
        return replace(self.privacy, spends=self._record_spending)

    def _record_spending(self, phase: str, spending: Spending, source: str) -> None:
        """Writes the privacy cost of a private step into the record, for all other parties, because
        they all receive results of the model.
        """
        if self.record is not None:
            cost = self.need_privacy().cost(spending).text
            receivers = [party.name for party in self.recipe.parties if party.name != self.name]
            self.record.spends(phase, cost, spending.steps, source, receivers)

    @property
    def features(self) -> Features | None:
        """The party's features; None if it has none."""
        return self.data.features

    def need_features(self) -> Features:
        """Returns the party's features. Raises InputError if it has none."""
        if self.features is None:
            raise InputError(
                Code.DATA_INVALID,
                f"{self.name} has no features. Add a [data] table to its party file.",
            )
        return self.features

    def own_embeddings(self, rows: Rows) -> list[Tensor]:
        """Returns a list with this party's embeddings of ``rows``, [B, D]; an empty list without
        features.
        """
        if self.features is None:
            return []
        return [self.encode(*self.features.inputs(rows))]

    def need_labels(self) -> tuple[Labels, Tensor]:
        """Returns the label encoder and the encoded labels of all rows. Raises InputError if the
        party has no labels.
        """
        labels, targets = self.data.labels, self.data.targets
        if labels is None or targets is None:
            raise InputError(
                Code.DATA_INVALID, f"{self.name} has no labels. Set data.label in its party file."
            )
        return labels, targets

    def row_weights(self, rows: Rows) -> Tensor | None:
        """Returns the weight of each row in the loss, float32 [N], with mean 1 over the training
        rows ``rows``. Returns None if all rows have the same weight.

        Raises InputError.
        """
        labels, targets = self.need_labels()
        weights = row_weights(self.recipe.task, labels, targets, self.data.weights, rows)
        return weights.to(self.device) if weights is not None else None

    def rows(self, split: str) -> Rows:
        """Returns a split of this party's own rows, ascending: ``train``, ``aligned``, ``local``,
        ``validation``, ``test``, or ``all``.
        """
        return self.data.splits[split]

    @property
    def awaits_sizes(self) -> bool:
        """Whether this party does not know yet how many rows each passive party has."""
        return self.role == "active" and self.recipe.own_rows and not self.data.holdings

    def joint_rows(self, split: str) -> Rows:
        """Returns the rows of a split, in row numbers that are common to all parties; see
        ``own_rows``.
        """
        held = self.data.held
        return self.data.splits[split] if held is None else held.splits[split]

    def own_rows(self, rows: Rows) -> Rows:
        """Returns the row numbers, at this party, of those ``rows`` that this party has. ``rows``:
        Row numbers that are common to all parties.
        """
        held = self.data.held
        return rows if held is None or self.role == "active" else held.own(self.name, rows)

    def sizes_of(self, rows: Rows) -> dict[str, dict[str, int]] | None:
        """Returns {passive party: {"rows": the number of ``rows`` that it has}} as sizes for an
        exchange, without parties that have none. Returns None if all parties have all rows.
        """
        held = self.data.held
        if held is None:
            return None
        return {name: {"rows": count} for name, count in held.counts(rows).items()}

    def ticker(self, phase: str, round_: int, rounds: int, batches: int) -> Callable[[], None]:
        """Returns a function that the phase must call after each of the ``batches`` batches of a
        round.
        """
        counter = itertools.count(1)
        return lambda: self.tick(phase, round_, rounds, next(counter), batches)

    def take(self, values: Tensor, rows: Rows) -> Tensor:
        """Returns ``values[rows]`` on the device of ``values``."""
        return values.index_select(0, copy_index(torch.from_numpy(rows), values.device))
