"""Defines the context that a party gives to its phases: models, rows, connections and settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.plugins import describe_failure
from vfl_party.base.seeds import derive_seed
from vfl_party.models import InputSpec, build_checked_encoder, forward, seed_torch, width_of
from vfl_party.models.row_blocks import Blocks
from vfl_party.models.training import Precision
from vfl_party.outbound.chain import SentDigests
from vfl_party.outbound.declared import Role
from vfl_party.outbound.policies import AllowAll, Policy
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.exchanges import PartyExchanges
from vfl_party.phases.rows import PartyData, PartyRows
from vfl_party.privacy.accountant import Spending
from vfl_party.privacy.plan import PrivacyPlan


class PlannedPhase(Protocol):
    """A phase of the recipe with its method and settings; see ``NamedPhase``."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def method(self) -> Any: ...

    @property
    def settings(self) -> Any: ...

    @property
    def facts(self) -> Any: ...

    @property
    def evaluates(self) -> tuple[str, ...]: ...


class PlannedCourse(Protocol):
    """What a party and its phases use of ``Course``, whose module imports this one."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def phases(self) -> Sequence[PlannedPhase]: ...

    @property
    def lone_phase(self) -> PlannedPhase | None: ...

    @property
    def keeps_nothing(self) -> str | None: ...

    @property
    def sent_noise(self) -> float: ...

    @property
    def protected(self) -> str: ...

    @property
    def scores_own_rows(self) -> bool: ...

    @property
    def learns(self) -> str: ...

    @property
    def copes(self) -> bool: ...

    @property
    def without(self) -> LatePolicy: ...

    @property
    def evaluated(self) -> frozenset[str]: ...

    @property
    def follows_preset(self) -> bool: ...

    def after_labels(self, phase: str) -> bool: ...

    def encoder(self, make: MakeEncoder) -> nn.Module: ...

    def scores(self, party: Party, phase: str) -> Any: ...

    def online(self, party: Party) -> Any: ...

    def privacy(self, rows: int) -> PrivacyPlan | None: ...

    def build(self, party: Party) -> list[Phase]: ...


@dataclass(frozen=True)
class MakeEncoder:
    """Makes encoders of a party's kind for its inputs, on the CPU.

    ``secret``: See ``PartyTerms``.
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


class Encode(Protocol):
    """Passes batches through a party's encoder, float32 [B, D] for each, in the recipe's precision
    and on all of the party's GPUs. ``on_one_device``: Whether the party's encoder runs on one
    device, without other processes.
    """

    @property
    def on_one_device(self) -> bool: ...

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Passes a batch through the party's encoder. Raises InputError if it fails."""
        ...

    def through(self, encoder: nn.Module, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Passes batches of the same size through an encoder of the party's kind. The encoder may
        be an additional one that a phase trains. Returns the embeddings of each batch.
        ``batches``: The encoder's arguments, which must come from the party's features or an
        augmentation.
        """
        ...


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

    def make_ticker(self, phase: str, round_: int, rounds: int, batches: int) -> Callable[[], None]:
        """Returns a function that the phase must call after each of the ``batches`` batches of a
        round.
        """
        counter = itertools.count(1)
        return lambda: self.tick(phase, round_, rounds, next(counter), batches)


def _forward(model: nn.Module, precision: Precision, *inputs: Tensor) -> Tensor:
    """Passes inputs through a model in the recipe's precision."""
    if precision == "float32":
        output: Tensor = model(*inputs)
        return output
    return forward(model, *inputs, precision=precision)


class _CheckedEncoder:
    """A party's encoder on one device, or None. Checks the encoder's output, because the encoder
    may be a plug-in.
    """

    def __init__(self, encoder: nn.Module | None, precision: Precision, party: str) -> None:
        self._encoder, self._precision, self._party = encoder, precision, party
        self.on_one_device = encoder is not None
        # The shape of one embedding, once the first embeddings are known.
        self._width: tuple[int, ...] = ()

    def through(self, encoder: nn.Module, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Passes batches through an encoder."""
        return [encoder(*inputs) for inputs in batches]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Passes inputs through the encoder. Raises InputError if it fails or there is none."""
        if self._encoder is None:
            raise InputError(
                Code.DATA_INVALID, "a party without features has no encoder. Give it features."
            )
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


@dataclass(frozen=True)
class PartyTerms:
    """What a party decides or knows alone.

    Args:
        policy: Decides what this party may send.
        sent: Digests of the values that were sent in earlier generations.
        trees: The party file's limits for trees; None for no limits.
        secret: The root of the seeds that only this party can derive. None to derive all seeds from
            the recipe's seed.
    """

    policy: Policy = field(default_factory=AllowAll)
    sent: SentDigests = field(default_factory=SentDigests)
    trees: TreeLimits | None = None
    secret: int | None = None


class Party:
    """A party in one generation of a run: the object through which phases use its models, rows and
    exchanges.

    Args:
        name: The party's name in the recipe.
        course: The recipe with its phases and the settings that follow from them.
        device: The device of models and rows.
        models: {name: model}: ``encoder`` (if the party has features), and at the active party
            ``top`` and the models of ``Method.upper``. Or the models of ``Method.own_models``.
        data: The party's rows.
        terms: What the party decides or knows alone. Default: no limits and no secret.
        make_encoder: Makes encoders, for methods that train more than one encoder; None without
            features.
        encode: Passes batches through the encoder. By default, runs ``models["encoder"]`` on one
            device.

    ``rows``: The party's rows. ``exchanges``: The exchanges that the phases open. ``hooks``: The
    callbacks while a phase runs. ``scores``: The settings with which the party computes scores.
    """

    def __init__(
        self,
        name: str,
        course: PlannedCourse,
        device: torch.device,
        models: dict[str, nn.Module],
        data: PartyData,
        terms: PartyTerms | None = None,
        make_encoder: MakeEncoder | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.name, self.course, self.device, self.models = name, course, device, models
        self.terms = PartyTerms() if terms is None else terms
        self.make_encoder = make_encoder
        self.encode: Encode = (
            _CheckedEncoder(models.get("encoder"), self.recipe.model.precision, name)
            if encode is None
            else encode
        )
        recipe = self.recipe
        self.rows = PartyRows(data, name, recipe, device, self.encode)
        policy, sent = self.terms.policy, self.terms.sent
        self.exchanges = PartyExchanges[Party](
            name, recipe, device, self.rows, policy, sent, self._get_width
        )
        self.hooks, self.scores = Hooks(), Scores()

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.course.recipe

    @property
    def role(self) -> Role:
        """The party's role in the recipe."""
        return "active" if self.name == self.recipe.active.name else "passive"

    @property
    def own_seed(self) -> int:
        """The root of the seeds for all random values that only this party draws: weights, targets,
        orders, views. It may be secret.
        """
        return self.recipe.seed if self.terms.secret is None else self.terms.secret

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

    def need_privacy(self) -> PrivacyPlan:
        """Returns the privacy budget of the phases with ``dp``. Raises InternalError if there is
        none, and InputError if the phases do not fit together.
        """
        if self._privacy is None:
            raise InternalError(
                f"{self.name}: a phase with dp was made without a plan of its budget"
            )
        return replace(self._privacy, spends=self._record_spending)

    @cached_property
    def _privacy(self) -> PrivacyPlan | None:
        return find_privacy(self)

    def _record_spending(self, phase: str, spending: Spending, source: str) -> None:
        """Writes the privacy cost of a private step into the record, for all other parties, because
        they all receive results of the model.
        """
        record = self.exchanges.connections.record
        if record is not None:
            cost = self.need_privacy().cost(spending).text
            receivers = [party.name for party in self.recipe.parties if party.name != self.name]
            record.spends(phase, cost, spending.steps, source, receivers)

    def _get_width(self) -> int:
        make = self.make_encoder
        return self.recipe.embedding_size(self.name) if make is None else make.width


def with_course(party: Party, course: PlannedCourse) -> Party:
    """Returns the party in a run with another course. It has opened no exchanges."""
    own = party.device, party.models, party.rows.data, party.terms, party.make_encoder, party.encode
    changed_party = Party(party.name, course, *own)
    changed_party.exchanges.others = party.exchanges.others
    return changed_party


def find_privacy(party: Party) -> PrivacyPlan | None:
    """Returns the privacy budget of the phases with ``dp``; None if no phase has ``dp``. Raises
    InputError if the phases do not fit together.
    """
    train = party.rows.data.splits.get("train")
    return party.course.privacy(len(train)) if train is not None else None
