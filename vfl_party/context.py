"""What the phases of one party work with."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.data import Features, Labels
from vfl_party.exchange import TensorHub, TensorLink
from vfl_party.models import InputSpec, checked_encoder, forward, seeded
from vfl_party.seeds import derive_seed
from vfl_party.tensors import index_on

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MakeEncoder:
    """Makes encoders of a party's kind and input, on the CPU. ``width``: of the embedding that the recipe asks for."""

    recipe: Recipe
    party: str
    settings: EncoderSettings
    spec: InputSpec

    @property
    def width(self) -> int:
        return self.recipe.model.embedding_size

    def __call__(self, label: str, *, shared: bool = False, width: int | None = None) -> nn.Module:
        """An encoder with initial weights of its own for each label; ``shared``: drawn alike at every party.

        ``width``: of its output. Raises InputError where it does not fit the party's rows.
        """
        names = (label,) if shared else (self.party, label)
        with seeded(derive_seed(self.recipe.seed, "init", *names)):
            return checked_encoder(self.settings, self.spec, width or self.width, party=self.party)


def _quiet(_phase: str, _round: int, _rounds: int, _batch: int, _batches: int) -> None:
    return


@dataclass
class Party:
    """One party in one generation of a run. Row numbers are positions in the canonical order of the aligned ids.

    ``models``: ``encoder`` (where the party has features), and ``top`` at the active party; on ``device``.
    ``targets``: the encoded labels of all rows at the active party.
    ``splits``: see ``vfl_party.seeds.split_rows``; ``local`` may end with rows that this party alone has.
    ``make_encoder``: for methods that train more encoders than the one that they hand on.
    ``spread``: the encoder on several GPUs (``vfl_party.ranks``), called with whole batches; None on one.
    ``tick``: called after each step with (phase, rounds done, rounds, batches done, batches).
    """

    name: str
    recipe: Recipe
    device: torch.device
    models: dict[str, nn.Module]
    features: Features | None
    labels: Labels | None
    targets: Tensor | None
    splits: dict[str, Rows]
    make_encoder: MakeEncoder | None = None
    spread: Callable[..., Tensor] | None = None
    tick: Callable[[str, int, int, int, int], None] = field(default=_quiet)
    link: TensorLink | None = None
    hub: TensorHub | None = None
    server: TensorLink | None = None

    @property
    def embedding_size(self) -> int:
        return self.recipe.model.embedding_size

    def encode(self, *inputs: Tensor) -> Tensor:
        """The party's embeddings of a batch, float32 [B, D], in the recipe's precision and on all its GPUs."""
        if self.spread is not None:
            return self.spread(*inputs)
        return forward(self.models["encoder"], inputs, self.recipe.model.precision)

    def outputs(self, z_BD: Tensor) -> Tensor:
        """The top model's outputs for combined embeddings, float32 [B, O], in the recipe's precision."""
        return forward(self.models["top"], (z_BD,), self.recipe.model.precision)

    def unhurried(self) -> None:
        """The next exchange waits as long as the peers live: they may be at work on their own."""
        for way in (self.link.link if self.link is not None else None, self.hub.hub if self.hub is not None else None):
            if way is not None:
                way.unhurried()

    def need_link(self) -> TensorLink:
        """The way to the active party. Raises InputError at the active party."""
        if self.link is None:
            raise InputError(Code.ROLE_MISMATCH, f"{self.name} is not a passive party")
        return self.link

    def need_hub(self) -> TensorHub:
        """The exchange with the passive parties. Raises InputError at a passive party."""
        if self.hub is None:
            raise InputError(Code.ROLE_MISMATCH, f"{self.name} is not the active party")
        return self.hub

    def need_server(self) -> TensorLink:
        """The way to the aggregation server, where a phase of the recipe aggregates. Raises InputError elsewhere."""
        if self.server is None:
            raise InputError(Code.CONFIG_INVALID, f"{self.name}: no phase of this run aggregates at the server")
        return self.server

    def need_features(self) -> Features:
        if self.features is None:
            raise InputError(Code.DATA_INVALID, f"{self.name} has no features; its party file needs a [data] table")
        return self.features

    def need_labels(self) -> tuple[Labels, Tensor]:
        """The label encoder and the encoded labels of all rows."""
        if self.labels is None or self.targets is None:
            raise InputError(Code.DATA_INVALID, f"{self.name} has no labels; set data.label in its party file")
        return self.labels, self.targets

    def rows(self, split: str) -> Rows:
        """The rows of a split, ascending: ``train``, ``aligned``, ``local``, ``validation``, ``test``, or ``all``."""
        return self.splits[split]

    def ticker(self, phase: str, round_: int, rounds: int, batches: int) -> Callable[[], None]:
        """To be called after each of the ``batches`` of a round."""
        done = itertools.count(1)
        return lambda: self.tick(phase, round_, rounds, next(done), batches)

    def take(self, values: Tensor, rows: Rows) -> Tensor:
        """``values[rows]`` on the device of ``values``."""
        return values.index_select(0, index_on(torch.from_numpy(rows), values.device))


def rows_digest(run_id: str, ids: Sequence[str]) -> bytes:
    """HMAC-SHA-256, keyed by the run, of the ordered ids: equal for equal lists, meaningless outside the run."""
    mac = hmac.new(run_id.encode(), digestmod=hashlib.sha256)
    for row_id in ids:
        encoded = row_id.encode()
        mac.update(len(encoded).to_bytes(4, "little") + encoded)
    return mac.digest()
