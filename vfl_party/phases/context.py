"""The context in which the phases of one party work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_common.link import PROTOCOL, Hub, Link
from vfl_party.base.devices import index_on
from vfl_party.base.plugins import where_it_failed
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.step_timing import Clock
from vfl_party.data import Features, Labels
from vfl_party.models import InputSpec, checked_encoder, forward, seeded
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Role
from vfl_party.outbound.exchange import Answering, Asking, Ways
from vfl_party.outbound.policies import Policy
from vfl_party.outbound.policies.allow_all import AllowAll
from vfl_party.outbound.sent import SentBefore
from vfl_party.phases.absence import LatePolicy
from vfl_party.privacy.plan import PrivacyPlan

# Numbers, codes, names.
Columns = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]


@dataclass(frozen=True)
class MakeEncoder:
    """Makes encoders of a party's kind and input, on the CPU. ``width``: of the embedding that the
    recipe asks for.

    ``secret``: see ``Party``.
    """

    recipe: Recipe
    party: str
    settings: EncoderSettings
    spec: InputSpec
    secret: int | None = None

    @property
    def width(self) -> int:
        return self.recipe.model.embedding_size

    def __call__(self, label: str, *, shared: bool = False, width: int | None = None) -> nn.Module:
        """Makes an encoder with its own initial weights for each label; ``shared``: the same
        weights at every party.

        ``width``: of its output. Raises InputError if it does not fit the party's rows.
        """
        root = self.recipe.seed if shared or self.secret is None else self.secret
        with seeded(derive_seed(root, "init", *((label,) if shared else (self.party, label)))):
            return checked_encoder(self.settings, self.spec, width or self.width, party=self.party)


def _without_encoder(*_inputs: Tensor) -> Tensor:
    raise InputError(Code.DATA_INVALID, "a party without features has no encoder")


def _quiet(_phase: str, _round: int, _rounds: int, _batch: int, _batches: int) -> None:
    return


@dataclass(frozen=True)
class Hooks:
    """What a party calls while a phase runs.

    ``tick``: called after each step with (phase, rounds done, rounds, batches done, batches).
    ``lenient``: called by a phase at the active party once all have come to it, if it goes on
    without a lost party. ``show``: reports an event, which is in the log already, to the person in
    front of the party.
    """

    tick: Callable[[str, int, int, int, int], None] = field(default=_quiet)
    lenient: Callable[[bool], None] = field(default=lambda _on: None)
    show: Callable[..., None] = field(default=lambda _event, **_facts: None)


@dataclass
class Party:
    """One party in one generation of a run. Row numbers are positions in the canonical order of the
    aligned ids.

    ``models``: ``encoder`` (if the party has features), ``top`` at the active party, and what
    ``Method.upper`` makes there; on ``device``. ``targets``: the encoded labels of all rows at the
    active party. ``splits``: see ``vfl_party.base.seeds.split_rows``; ``local`` may end with rows
    that only this party has. ``ids``: of the rows that are in ``splits``, but for those that only
    this party has. ``holdings``: {passive party: {split: rows}}, if the parties hold different
    rows; else empty. ``others``: {other party: as it is before it joins}, in a forecast that has
    all parties' data; else empty. ``make_encoder``: for methods that train other encoders beside
    the party's own. ``encode``: the encoder, called with the inputs of a batch: embeddings, float32
    [B, D], in the recipe's precision and on all of the party's GPUs; by default
    ``models["encoder"]`` on one. ``columns``: gives the aligned rows' cells as the table has them,
    see ``Prepared.cells``; None without features. ``tick``, ``lenient``, ``show``: see ``Hooks``.
    ``policy``: decides what may leave this party. ``sent``: what has left in earlier generations.
    ``trees``: what the party file asks of trees; None in a rehearsal, which asks for nothing.
    ``privacy``: the budget of the phases with differential privacy; None if there are none.
    ``late_policy``: of the first phase that goes on without a party; ``wait`` if there is none.
    ``sent_noise``: σ of the noise on the embeddings that a passive party sends for evaluation and
    prediction. ``protected``: how its encoders protect embeddings, in words: see
    ``Method.protects``. ``secret``: the root of the seeds that only this party can derive; None:
    all follow from the recipe's seed. ``ways``: the links and the hub of this generation; None
    before the party is connected. ``exchanges``: {(phase, exchange's name): its asking or answering
    side}, as the phases have opened them.
    """

    name: str
    recipe: Recipe
    device: torch.device
    models: dict[str, nn.Module]
    features: Features | None
    labels: Labels | None
    targets: Tensor | None
    splits: dict[str, Rows]
    ids: Sequence[str] = ()
    holdings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    others: Mapping[str, Party] = field(default_factory=dict)
    make_encoder: MakeEncoder | None = None
    encode: Callable[..., Tensor] = field(default=_without_encoder)
    columns: Callable[[], Columns] | None = None
    tick: Callable[[str, int, int, int, int], None] = field(default=_quiet)
    lenient: Callable[[bool], None] = field(default=lambda _on: None)
    show: Callable[..., None] = field(default=lambda _event, **_facts: None)
    policy: Policy = field(default_factory=AllowAll)
    sent: SentBefore = field(default_factory=SentBefore)
    trees: TreeLimits | None = None
    privacy: PrivacyPlan | None = None
    late_policy: LatePolicy = "wait"
    sent_noise: float = 0.0
    protected: str = ""
    secret: int | None = None
    ways: Ways | None = None
    exchanges: dict[tuple[str, str], Asking | Answering] = field(default_factory=dict)
    # Of the first embeddings.
    _width: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.encode is _without_encoder and "encoder" in self.models:
            self.encode = self._encode

    # -- what the phases exchange
    # ----------------------------------------------------------------------

    def _encode(self, *inputs: Tensor) -> Tensor:
        """Passes inputs through the encoder, which may be the user's own. Raises InputError if it
        fails.
        """
        try:
            z = forward(self.models["encoder"], *inputs, precision=self.recipe.model.precision)
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.MODEL_INVALID, f"the encoder of {self.name} failed {where_it_failed(error)}"
            ) from error
        rows, shape = inputs[0].shape[0], tuple(z.shape) if isinstance(z, Tensor) else ()
        self._width = self._width or shape[-1:]
        if shape != (rows, *self._width):
            what = (
                f"a tensor of shape {list(shape)}"
                if isinstance(z, Tensor)
                else f"a {type(z).__name__}"
            )
            wanted = [rows, *self._width]
            text = (
                f"the encoder of {self.name} gives {what} for {rows} rows, and {wanted} is wanted"
            )
            raise InputError(Code.MODEL_INVALID, f"{text}; correct the encoder")
        return z

    @property
    def encodes_here(self) -> bool:
        """Whether ``encode`` is the encoder on one device, and no other process has a part in
        it.
        """
        return self.encode == self._encode

    @property
    def own_seed(self) -> int:
        """The root of all seeds of what only this party draws: weights, targets, orders, views. It
        may be secret.
        """
        return self.recipe.seed if self.secret is None else self.secret

    @property
    def role(self) -> Role:
        return "active" if self.name == self.recipe.active.name else "passive"

    @property
    def link(self) -> Link | None:
        """See ``Ways``."""
        return self.ways.link if self.ways is not None else None

    @property
    def hub(self) -> Hub | None:
        """See ``Ways``."""
        return self.ways.hub if self.ways is not None else None

    @property
    def server(self) -> Link | None:
        """See ``Ways``."""
        return self.ways.server if self.ways is not None else None

    @property
    def clock(self) -> Clock:
        """See ``Ways``."""
        return self.ways.clock if self.ways is not None else Clock()

    @property
    def protocol(self) -> int:
        """See ``Ways``."""
        return self.ways.protocol if self.ways is not None else PROTOCOL

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
        """Opens this party's asking side of an exchange. ``sizes``: those that are the same at
        every step.

        Raises as ``chains``.
        """
        peer = self.recipe.server if exchange.asks == "server" else self.recipe.active.name
        asking = Asking(
            exchange, phase, self.chains(phase, exchange), self, peer, self.device, sizes
        )
        self.exchanges[phase, exchange.name] = asking
        return asking

    def answering(self, phase: str, exchange: Exchange, **sizes: int) -> Answering:
        """Opens the active party's answering side of an exchange; see ``asking``."""
        answering = Answering(
            exchange, phase, self.chains(phase, exchange), self, self.device, sizes
        )
        self.exchanges[phase, exchange.name] = answering
        return answering

    def unhurried(self) -> None:
        """Lets the next exchange wait as long as the peers live: they may be at work on their
        own.
        """
        for way in (self.link, self.hub):
            if way is not None:
                way.unhurried()

    # -- models and rows
    # ----------------------------------------------------------------------

    @property
    def embedding_size(self) -> int:
        return self.recipe.model.embedding_size

    def outputs(self, z_BD: Tensor) -> Tensor:
        """Returns the top model's outputs for combined embeddings, float32 [B, O], in the recipe's
        precision.
        """
        return forward(self.models["top"], z_BD, precision=self.recipe.model.precision)

    def need_privacy(self) -> PrivacyPlan:
        """Returns the budget of the phases with differential privacy. Raises InternalError if
        nothing was planned.
        """
        if self.privacy is None:
            raise InternalError(
                f"{self.name}: a phase with dp was made without a plan of its budget"
            )
        return self.privacy

    def need_features(self) -> Features:
        if self.features is None:
            raise InputError(
                Code.DATA_INVALID,
                f"{self.name} has no features; its party file needs a [data] table",
            )
        return self.features

    def need_labels(self) -> tuple[Labels, Tensor]:
        """Returns the label encoder and the encoded labels of all rows. Raises InputError if there
        are none.
        """
        if self.labels is None or self.targets is None:
            raise InputError(
                Code.DATA_INVALID, f"{self.name} has no labels; set data.label in its party file"
            )
        return self.labels, self.targets

    def rows(self, split: str) -> Rows:
        """Returns a split, ascending: ``train``, ``aligned``, ``local``, ``validation``, ``test``,
        or ``all``.
        """
        return self.splits[split]

    def ticker(self, phase: str, round_: int, rounds: int, batches: int) -> Callable[[], None]:
        """Returns a function to call after each of the ``batches`` of a round."""
        done = itertools.count(1)
        return lambda: self.tick(phase, round_, rounds, next(done), batches)

    def take(self, values: Tensor, rows: Rows) -> Tensor:
        """Returns ``values[rows]`` on the device of ``values``."""
        return values.index_select(0, index_on(torch.from_numpy(rows), values.device))
