"""Pairs of an active attacker: the embeddings of rows in an exchange, and the columns of these
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl.leak_meter.scene.scene import Image, Intercepted, Scene, UnfitError
from vfl_party.base.seeds import Rows, derive_seed

# Concatenation of these embeddings of a row.
ALL_THREE = "first, last and mean"
# Share of known rows, minimum and maximum number of them, and maximum number of judged rows.
_SHARE, _MIN_KNOWN, _MAX_KNOWN, _JUDGED = 0.1, 50, 2000, 5000
# Maximum width of the concatenated embeddings of a row; with more rounds, some are left out.
_MAX_WIDTH = 2048


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows that one sender sent in one exchange: known rows, whose columns the attacker has, and
    rows that are judged.

    ``place``: the phase and the exchange. ``z_known``, ``values_known``: [K, D] and [K, F].
    ``own``: the attacker's own columns of these rows; None without columns. ``groups``, ``image``:
    see ``EncoderInputs``. ``over``: {how the embeddings of all recorded rounds are combined: those
    of the known and of the judged rows}; empty if each row came once. ``stacked``: the concatenated
    embeddings of all rounds, of the known and of the judged rows. ``labels``: the labels of the
    known and of the judged rows, which an active party has, [K, 1] and [N, 1].
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


def pairs(scene: Scene, *, images: bool | None = None, what: str = "embeddings") -> Iterator[Pairs]:
    """Yields the pairs of each sender whose columns are known, exchange by exchange.

    Each exchange is read separately, because a defence may protect only some. Exchanges with too
    few rows are left out. ``images``: only senders whose columns are (True) or are not (False) an
    image. ``what``: the name of the embeddings in texts. Raises UnfitError if there is no such
    sender, or no exchange has enough rows.
    """
    senders = senders_of(scene, images)
    if not senders and senders_of(scene):
        raise UnfitError(
            "no sender's columns are an image" if images else "all columns are pixels; see images"
        )
    some = False
    for sender in senders:
        for place, sent in _collect_embeddings(scene.embeddings[sender]()).items():
            if len(sent) >= 2 * _MIN_KNOWN:
                some = True
                yield _pairs(scene, sender, place, sent)
    if not some:
        raise UnfitError(f"no party sends {what} of at least {2 * _MIN_KNOWN} known rows")


def exchanges_left_out(scene: Scene, *, images: bool | None = None) -> list[str]:
    """Returns the exchanges that ``pairs`` leaves out, with the number of their rows."""
    exchanges = []
    for sender in senders_of(scene, images):
        sizes = {
            place: len(sent)
            for place, sent in _collect_embeddings(scene.embeddings[sender]()).items()
        }
        exchanges += [
            f"{place} of {sender} ({n} rows)" for place, n in sizes.items() if n < 2 * _MIN_KNOWN
        ]
    return exchanges


def senders_of(scene: Scene, images: bool | None = None) -> list[str]:
    """Returns who sends embeddings of columns that are known; ``images`` as for ``pairs``."""
    known = [sender for sender in scene.embeddings if sender in scene.columns]
    return [
        sender
        for sender in known
        if images is None or (scene.columns[sender].image is not None) == images
    ]


class _Sent:
    """Embeddings of each row in one exchange: its first and its last embedding, and the sum and
    number of all.
    """

    def __init__(self, width: int) -> None:
        # The rows, as they came first.
        self.order: dict[int, None] = {}
        self.first, self.last = torch.empty(0, width), torch.empty(0, width)
        self.total, self.times = (
            torch.empty(0, width, dtype=torch.float64),
            torch.empty(0, dtype=torch.int64),
        )

    def add(self, rows_B: Rows, z_BD: Tensor) -> None:
        """Adds a message; a row is there once."""
        more = int(rows_B.max(initial=-1)) + 1 - len(self.times)
        if more > 0:
            for name in ("first", "last", "total", "times"):
                old = getattr(self, name)
                setattr(
                    self, name, torch.cat([old, old.new_zeros(max(more, len(old)), *old.shape[1:])])
                )
        at, z_BD = torch.from_numpy(rows_B), z_BD.float()
        new = self.times[at] == 0
        self.first[at[new]] = z_BD[new]
        self.last[at] = z_BD
        self.total[at] += z_BD
        self.times[at] += 1
        self.order.update(dict.fromkeys(rows_B.tolist()))

    def __len__(self) -> int:
        return len(self.order)

    def over(self, rows_B: Rows) -> dict[str, Tensor]:
        """Returns {how a row's embeddings are put together: that of some rows}; nothing if each row
        came once.
        """
        if len(self.times) == 0 or int(self.times.max()) < 2:
            return {}
        at = torch.from_numpy(rows_B)
        mean_BD = (self.total[at] / self.times[at, None].clamp_min(1)).float()
        ends_BD = torch.cat([self.first[at], self.last[at]], dim=1)
        return {
            "mean": mean_BD,
            "first and last": ends_BD,
            ALL_THREE: torch.cat([mean_BD, ends_BD], dim=1),
        }


def _collect_embeddings(batches: Iterator[Intercepted]) -> dict[str, _Sent]:
    """Returns {phase and exchange: what has come of its rows}."""
    sent: dict[str, _Sent] = {}
    for batch in batches:
        z_BD = batch.came.flatten(1)
        sent.setdefault(batch.place, _Sent(z_BD.shape[1])).add(batch.rows, z_BD)
    return sent


def _pairs(scene: Scene, sender: str, place: str, sent: _Sent) -> Pairs:
    rows = np.random.default_rng(derive_seed(scene.seed, "auxiliary rows", sender)).permutation(
        [*sent.order]
    )
    count = count_known(len(rows))
    known, judged = rows[:count], rows[count : count + _JUDGED]
    columns, own = scene.columns[sender], scene.columns.get(scene.attacker)
    over, over_judged = sent.over(known), sent.over(judged)
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
    """Returns the embeddings of rows in all rounds side by side, [R, T * D]; 0 where a row did not
    come.
    """
    batches = [batch for batch in scene.embeddings[sender]() if batch.place == place]
    rounds = sorted({batch.round for batch in batches})
    width = batches[0].came.flatten(1).shape[1]
    taken = rounds[:: -(-len(rounds) * width // _MAX_WIDTH)]
    at = np.full(max(int(batch.rows.max(initial=-1)) for batch in batches) + 1, -1)
    at[rows] = np.arange(len(rows))
    stacked = torch.zeros(len(rows), len(taken), width)
    for batch in batches:
        if batch.round in taken:
            here = at[batch.rows]
            inside = torch.from_numpy(here >= 0)
            z_BD = batch.came.flatten(1).float()
            stacked[torch.from_numpy(here)[inside], taken.index(batch.round)] = z_BD[inside]
    return stacked.flatten(1)
