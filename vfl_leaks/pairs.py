"""Pairs of embeddings and columns of the same rows, from which an active party trains an attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl_leaks.scene import Image, Intercepted, Scene, UnfitError
from vfl_party.base.seeds import Rows, derive_seed

# Name of the concatenation of a row's first, last and mean embedding.
ALL_THREE = "first, last and mean"
# The share, the minimum and the maximum number of known rows, and the maximum of judged rows.
_SHARE, _MIN_KNOWN, _MAX_KNOWN, _JUDGED = 0.1, 50, 2000, 5000
# Maximum width of the concatenated embeddings of a row; with more rounds, some are left out.
_MAX_WIDTH = 2048


@dataclass(frozen=True, eq=False)
class Pairs:
    """The rows that one sender sent in one exchange. The attacker has the columns of the known
    rows. The attack is measured on the judged rows.

    ``place``: the phase and the exchange. ``z_known``, ``values_known``: the embeddings [K, D] and
    the columns [K, F] of the known rows. ``own``: the attacker's own columns of the known and of
    the judged rows; None if it has no columns. ``groups``, ``image``: see ``EncoderInputs``.
    ``over``: {name of a combination of all recorded rounds: the combined embeddings of the known
    and of the judged rows}; empty if each row was sent once. ``stacked``: the concatenated
    embeddings of all rounds, for the known and for the judged rows. ``labels``: the labels of the
    known and of the judged rows, [K, 1] and [N, 1].
    """

    sender: str
    place: str
    names: tuple[str, ...]
    z_known: Tensor
    values_known: Tensor
    z_judged: Tensor
    values_judged: Tensor
    own: tuple[Tensor, Tensor] | None
    groups: Mapping[str, range] = field(default_factory=dict)
    image: Image | None = None
    over: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stacked: tuple[Tensor, Tensor] | None = None
    labels: tuple[Tensor, Tensor] | None = None


def count_known(count: int) -> int:
    """Returns the number of rows, of ``count``, whose columns the attacker knows."""
    return min(_MAX_KNOWN, max(_MIN_KNOWN, int(_SHARE * count)))


def yield_pairs(
    scene: Scene, *, images: bool | None = None, what: str = "embeddings"
) -> Iterator[Pairs]:
    """Yields the pairs of each sender with known columns, for each exchange.

    Each exchange is read separately, because a defence may protect only some exchanges. Exchanges
    with too few rows are left out. ``images``: True selects the senders whose columns are pixels,
    False the other senders. ``what``: the name of the embeddings in messages. Raises UnfitError if
    there is no such sender, or no exchange has enough rows.
    """
    senders = find_senders(scene, images)
    if not senders and find_senders(scene):
        raise UnfitError(
            "no sender's columns are an image" if images else "all columns are pixels; see images"
        )
    yielded = False
    for sender in senders:
        for place, sent in _collect_embeddings(scene.embeddings[sender]()).items():
            if len(sent) >= 2 * _MIN_KNOWN:
                yielded = True
                yield _make_pairs(scene, sender, place, sent)
    if not yielded:
        raise UnfitError(f"no party sends {what} of at least {2 * _MIN_KNOWN} known rows")


def list_small_exchanges(scene: Scene, *, images: bool | None = None) -> list[str]:
    """Returns a text for each exchange that ``yield_pairs`` leaves out, with its number of rows."""
    exchanges = []
    for sender in find_senders(scene, images):
        sizes = {
            place: len(sent)
            for place, sent in _collect_embeddings(scene.embeddings[sender]()).items()
        }
        exchanges += [
            f"{place} of {sender} ({n} rows)" for place, n in sizes.items() if n < 2 * _MIN_KNOWN
        ]
    return exchanges


def find_senders(scene: Scene, images: bool | None = None) -> list[str]:
    """Returns the senders of embeddings whose columns are known; ``images``: see
    ``yield_pairs``.
    """
    senders = [sender for sender in scene.embeddings if sender in scene.columns]
    return [
        sender
        for sender in senders
        if images is None or (scene.columns[sender].image is not None) == images
    ]


class _RowEmbeddings:
    """The embeddings of each row in one exchange: the first, the last, and the sum and number of
    all.
    """

    def __init__(self, width: int) -> None:
        # The rows in the order in which they first came.
        self.order: dict[int, None] = {}
        self.first, self.last = torch.empty(0, width), torch.empty(0, width)
        self.total, self.times = (
            torch.empty(0, width, dtype=torch.float64),
            torch.empty(0, dtype=torch.int64),
        )

    def add(self, rows_B: Rows, z_BD: Tensor) -> None:
        """Adds a message, in which each row occurs once."""
        missing = int(rows_B.max(initial=-1)) + 1 - len(self.times)
        if missing > 0:
            for name in ("first", "last", "total", "times"):
                old = getattr(self, name)
                setattr(
                    self,
                    name,
                    torch.cat([old, old.new_zeros(max(missing, len(old)), *old.shape[1:])]),
                )
        index_B, z_BD = torch.from_numpy(rows_B), z_BD.float()
        is_new_B = self.times[index_B] == 0
        self.first[index_B[is_new_B]] = z_BD[is_new_B]
        self.last[index_B] = z_BD
        self.total[index_B] += z_BD
        self.times[index_B] += 1
        self.order.update(dict.fromkeys(rows_B.tolist()))

    def __len__(self) -> int:
        return len(self.order)

    def combine_rounds(self, rows_B: Rows) -> dict[str, Tensor]:
        """Returns {name of the combination: the combined embeddings of rows, [B, ...]}; empty if
        each row came once.
        """
        if len(self.times) == 0 or int(self.times.max()) < 2:
            return {}
        index_B = torch.from_numpy(rows_B)
        mean_BD = (self.total[index_B] / self.times[index_B, None].clamp_min(1)).float()
        ends_BD = torch.cat([self.first[index_B], self.last[index_B]], dim=1)
        return {
            "mean": mean_BD,
            "first and last": ends_BD,
            ALL_THREE: torch.cat([mean_BD, ends_BD], dim=1),
        }


def _collect_embeddings(batches: Iterator[Intercepted]) -> dict[str, _RowEmbeddings]:
    """Returns {phase and exchange: the embeddings of its rows}."""
    sent: dict[str, _RowEmbeddings] = {}
    for batch in batches:
        z_BD = batch.came.flatten(1)
        sent.setdefault(batch.place, _RowEmbeddings(z_BD.shape[1])).add(batch.rows, z_BD)
    return sent


def _make_pairs(scene: Scene, sender: str, place: str, sent: _RowEmbeddings) -> Pairs:
    rows = np.random.default_rng(derive_seed(scene.seed, "auxiliary rows", sender)).permutation(
        [*sent.order]
    )
    count = count_known(len(rows))
    known, judged = rows[:count], rows[count : count + _JUDGED]
    columns, own = scene.columns[sender], scene.columns.get(scene.attacker)
    over, over_judged = sent.combine_rounds(known), sent.combine_rounds(judged)
    stacked_RD = _stack(scene, sender, place, np.concatenate([known, judged])) if over else None
    labels_N1 = (scene.labels if scene.targets is None else scene.targets)[:, None].float()
    return Pairs(
        sender,
        place,
        columns.names,
        sent.last[torch.from_numpy(known)],
        columns.table(known),
        sent.last[torch.from_numpy(judged)],
        columns.table(judged),
        None if own is None else (own.table(known), own.table(judged)),
        columns.groups,
        columns.image,
        {how: (over[how], over_judged[how]) for how in over},
        None if stacked_RD is None else (stacked_RD[:count], stacked_RD[count:]),
        (labels_N1[known], labels_N1[judged]),
    )


def _stack(scene: Scene, sender: str, place: str, rows: Rows) -> Tensor:
    """Returns the concatenated embeddings of rows in T rounds, [R, T * D]; 0 for a round without
    the row.
    """
    batches = [batch for batch in scene.embeddings[sender]() if batch.place == place]
    rounds = sorted({batch.round for batch in batches})
    width = batches[0].came.flatten(1).shape[1]
    chosen_rounds = rounds[:: -(-len(rounds) * width // _MAX_WIDTH)]
    index_of_row = np.full(max(int(batch.rows.max(initial=-1)) for batch in batches) + 1, -1)
    index_of_row[rows] = np.arange(len(rows))
    stacked = torch.zeros(len(rows), len(chosen_rounds), width)
    for batch in batches:
        if batch.round in chosen_rounds:
            index_B = index_of_row[batch.rows]
            is_wanted = torch.from_numpy(index_B >= 0)
            z_BD = batch.came.flatten(1).float()
            stacked[torch.from_numpy(index_B)[is_wanted], chosen_rounds.index(batch.round)] = z_BD[
                is_wanted
            ]
    return stacked.flatten(1)
