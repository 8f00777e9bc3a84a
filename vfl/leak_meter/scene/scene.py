"""A scene: what one party received in a rehearsal, its own data, and the truth by which attacks are
judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vfl_common.config.models import OptimizerSettings, TaskSettings
from vfl_party.base.seeds import Rows

Role = Literal["active", "passive", "server"]
# Suffix of the knowledge of an attacker that uses all messages about a row, not only the last.
ALL_EPOCHS = "all epochs"


class UnfitError(Exception):
    """An attack cannot be played on this scene; the text says why, for the table's notes."""


@dataclass(frozen=True, eq=False)
class Intercepted:
    """The content of one message to the attacker, and the same without the sender's chain.

    ``rows``: the rows of the message, in order. ``came``: [B, D], after the receiver has undone
    codecs. ``meant``: the same before the sender's chain; None if the sender's side was not
    recorded. ``exchange``: its name in the phase.
    """

    phase: str
    round: int
    batch: int
    rows: Rows
    came: Tensor
    meant: Tensor | None = None
    exchange: str = ""

    @property
    def place(self) -> str:
        """Phase and exchange, ``splitnn/embedding``."""
        return f"{self.phase}/{self.exchange}" if self.exchange else self.phase


@dataclass(frozen=True, eq=False)
class Heard:
    """One message of an exchange that a phase allows to be overheard.

    ``behind``: the truth behind it, if the sender's phase knows it; for judges, not for attackers.
    ``name``: the name of the tensor if the message has several, each of which is a ``Heard``.
    """

    phase: str
    exchange: str
    round: int
    sender: str
    receiver: str
    tensor: Tensor
    behind: Tensor | None = None
    name: str = ""


@dataclass(frozen=True, eq=False)
class Owner:
    """A party as a judge knows it: its trained encoder, the encoder's arguments for rows, its rows
    by split.
    """

    encoder: nn.Module
    inputs: Callable[[Rows], tuple[Tensor, ...]]
    rows: Mapping[str, Rows]


@dataclass(frozen=True, eq=False)
class Beginning:
    """The recipe's settings of a party whose encoder the first phase trains, and the gradients
    that the attacker has sent to that party.

    ``phase``: the name of the phase. ``make``: makes the untrained encoder of a party from the root
    of its seeds. ``known``: the root that all know, the recipe's seed; ``true``: the party's own
    root, for a judge. ``optimizer``: that of the encoder; ``epochs``: that of the phase. ``plain``:
    whether each batch gives one update by its gradient. ``replies``: the batches of gradients that
    the attacker has sent to that party.
    """

    phase: str
    make: Callable[[int], nn.Module]
    known: int
    true: int
    optimizer: OptimizerSettings
    epochs: int
    plain: bool
    replies: Callable[[], Iterator[Intercepted]]


@dataclass(frozen=True)
class Image:
    """How columns are the pixels of an image. ``shape``: C, H and W, at least two pixels high and
    wide.

    ``shift``, ``scale``: of each channel, what was taken from its pixels, and by what they were
    then divided.
    """

    shape: tuple[int, int, int]
    shift: tuple[float, ...]
    scale: tuple[float, ...]

    def pixels(self, values_BF: Tensor) -> Tensor:
        """Returns images [B, C, H, W] in the numbers of their source."""
        shift, scale = (
            torch.tensor(values, dtype=torch.float32)[:, None, None]
            for values in (self.shift, self.scale)
        )
        return values_BF.reshape(-1, *self.shape) * scale + shift


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """A party's encoder inputs as a table of numbers.

    ``names``: of the table's columns. ``values``: [N, F], scaled. ``codes``: int64 [N, K],
    categories that are not among the values; -1 is a category that training did not have. In the
    table they follow as columns of 0 and 1. ``groups``: {column of categories: its columns of the
    table}; the last K are those of the codes. ``image``: if the columns are pixels.
    """

    names: tuple[str, ...]
    values: Tensor
    codes: Tensor | None = None
    groups: Mapping[str, range] = field(default_factory=dict)
    image: Image | None = None

    def table(self, rows: Rows) -> Tensor:
        """Returns some rows of the table, float32 [B, len(names)], on the CPU."""
        at = torch.from_numpy(rows)
        columns = [self.values[at.to(self.values.device)].cpu()]
        if self.codes is not None:
            for codes_N, group in zip(
                self.codes.T, [*self.groups.values()][-self.codes.shape[1] :], strict=True
            ):
                columns.append((codes_N[at, None] == torch.arange(len(group))).float())
        return torch.cat(columns, dim=1)


@dataclass(frozen=True, eq=False)
class Scene:
    """One attacker's view of a finished run.

    ``gradients``: the batches of gradients that came to a passive party. ``embeddings``: {sender:
    the same of its embeddings}, at the active party. ``labels``: the class of each row, int64 [N];
    -1 everywhere in a regression. ``rows``: {split: rows}. ``encoder``: the attacker's own trained
    encoder, in evaluation mode. ``inputs``: the encoder's arguments for rows. ``make_encoder``:
    makes an untrained encoder of the same kind. ``columns``: {party: its columns}; only the judge
    and the auxiliary rows use them. ``owners``: {party: what it has}, for the judge. ``heard``: the
    messages from and to the attacker that phases let be overheard, in order. ``beginnings``:
    {passive party: how its encoder began}, at the active party, if the first phase is split
    training. ``seed``: of all that an attack draws. ``targets``: the label of each row in a
    regression, float64 [N], scaled. The server has messages, and nothing else.
    """

    attacker: str
    role: Role
    task: TaskSettings
    labels: Tensor
    rows: Mapping[str, Rows]
    seed: int
    gradients: Callable[[], Iterator[Intercepted]]
    embeddings: Mapping[str, Callable[[], Iterator[Intercepted]]] = field(default_factory=dict)
    encoder: nn.Module | None = None
    inputs: Callable[[Rows], tuple[Tensor, ...]] | None = None
    make_encoder: Callable[[str], nn.Module] | None = None
    columns: Mapping[str, EncoderInputs] = field(default_factory=dict)
    heard: Callable[[], Iterator[Heard]] = field(default=lambda: iter(()))
    owners: Mapping[str, Owner] = field(default_factory=dict)
    targets: Tensor | None = None
    beginnings: Mapping[str, Beginning] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """How many classes the labels have. Raises UnfitError for a regression."""
        if self.task.kind == "regression":
            raise UnfitError("the labels are numbers, but the attack infers classes")
        return self.task.classes or 2

    @property
    def numbers(self) -> Tensor:
        """The labels of a regression, float64 [N]. Raises UnfitError for classes."""
        if self.targets is None:
            raise UnfitError("the labels are classes, but the attack infers numbers")
        return self.targets


@dataclass(frozen=True, eq=False)
class Shown:
    """Private images and their reconstructions, to be drawn.

    ``party``: the owner of the images. ``rows``: names and images [N, C, H, W] from 0 to 1, the
    private ones first. ``says``: a text on their similarity.
    """

    party: str
    rows: tuple[tuple[str, Tensor], ...]
    says: str


@dataclass(frozen=True)
class Figure:
    """One figure of one attack in one run.

    ``of``: what is read, ``labels`` or a column. ``knows``: what the attacker has in addition to
    the messages. ``unit``: AUC, accuracy, R², SSIM, or an error (MSE), for which a lower value is a
    larger leak. ``value``: the leak; the median over batches. ``high``: the 95 % quantile over
    batches, or None. ``chance``, ``chance_high``: the same for shuffled labels or a constant guess.
    ``baselines``: {attack without any message: its value}. ``batches``, ``skipped``: the numbers of
    judged and of skipped batches. ``place``: the phase and the exchange, if only one is read; the
    worst of several is shown. ``detail``: whether another figure summarizes it, or it is only for
    comparison. ``note``: a sentence below the table. ``shown``: images to draw.
    """

    of: str
    knows: str
    unit: str
    value: float
    high: float | None = None
    chance: float | None = None
    chance_high: float | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)
    batches: int = 0
    skipped: int = 0
    place: str = ""
    detail: bool = False
    note: str = ""
    shown: Shown | None = None


@dataclass(frozen=True)
class Attack:
    """The type that a module of ``vfl.leak_meter.attacks`` exports as ``ATTACK``, and an entry
    point of ``vfl.attacks`` names.

    ``about``: one sentence. ``by``: the role of the attacker; ``party``: any party. ``play``:
    returns its figures, or raises UnfitError. ``reads``: ``gradients`` or ``embeddings`` whose rows
    a phase names, the ``encoder`` that phases have trained, ``weights`` that a phase shares and
    lets be overheard, or the kind of a phase whose messages it knows, such as ``secureboost``. A
    run without them refuses the attack. '': the attack itself says if it is unfit.
    """

    about: str
    by: Role | Literal["party"]
    play: Callable[[Scene], Sequence[Figure]]
    reads: str = ""
