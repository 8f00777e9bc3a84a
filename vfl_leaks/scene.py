"""A scene: the messages that one party received in a rehearsal, the party's own data, and the truth
that judges attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vfl_common.config.models import OptimizerSettings
from vfl_common.config.task import TaskSettings
from vfl_common.linkage import Encodings
from vfl_party.base.seeds import Rows

Role = Literal["active", "passive", "server"]
# Describes the knowledge of an attacker that uses all messages about a row, not only the last.
ALL_EPOCHS = "all epochs"


class UnfitError(Exception):
    """An attack cannot be played on this scene. The table's notes show the text as the reason."""


@dataclass(frozen=True, eq=False)
class Intercepted:
    """The tensor of one message to the attacker, after and before the sender's transforms.

    ``rows``: the rows of the message, in order. ``came``: the received tensor [B, D], decoded by
    the receiver. ``meant``: the tensor before the sender's transforms; None if the sender's side
    was not recorded. ``exchange``: the name of the exchange in the phase.
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
        """The phase and the exchange, such as ``splitnn/embedding``."""
        return f"{self.phase}/{self.exchange}" if self.exchange else self.phase


@dataclass(frozen=True, eq=False)
class Heard:
    """One tensor of a message in an exchange that a phase allows to be overheard.

    ``behind``: the secret that the message hides, if the sender's phase knows it; only judges may
    use it. ``name``: the name of the tensor if the message has several.
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
    """The data of a party that judges use: its trained encoder, a function that returns the
    encoder's arguments for rows, and {split: rows}.
    """

    encoder: nn.Module
    inputs: Callable[[Rows], tuple[Tensor, ...]]
    rows: Mapping[str, Rows]


@dataclass(frozen=True, eq=False)
class Beginning:
    """How the training of a party's encoder begins, if the first phase is split training.

    ``phase``: the name of the phase. ``make``: makes the untrained encoder from a root seed.
    ``known``: the recipe's seed, which all parties know. ``true``: the party's real root seed, for
    a judge. ``optimizer``: the optimizer of the encoder. ``epochs``: the epochs of the phase.
    ``plain``: whether each batch makes exactly one update with its gradient. ``replies``: returns
    the batches of gradients that the attacker has sent to that party.
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
    """The format of columns that are the pixels of an image.

    ``shape``: C, H and W, at least two pixels high and wide. ``shift``, ``scale``: for each
    channel, the number that was subtracted from its pixels, and the number that divided the result.
    """

    shape: tuple[int, int, int]
    shift: tuple[float, ...]
    scale: tuple[float, ...]

    def pixels(self, values_BF: Tensor) -> Tensor:
        """Returns images [B, C, H, W] on the scale of the source, from scaled columns [B, F]."""
        shift, scale = (
            torch.tensor(values, dtype=torch.float32)[:, None, None]
            for values in (self.shift, self.scale)
        )
        return values_BF.reshape(-1, *self.shape) * scale + shift


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """A party's encoder inputs as a table of numbers.

    ``names``: the names of the table's columns. ``values``: the scaled columns, [N, F]. ``codes``:
    K categorical columns that are not among ``values``, int64 [N, K]; -1 is a category that
    training did not have. The table has them one-hot, after ``values``. ``groups``: {categorical
    column: its one-hot columns in the table}; the last K belong to ``codes``. ``image``: the image
    format if the columns are pixels.
    """

    names: tuple[str, ...]
    values: Tensor
    codes: Tensor | None = None
    groups: Mapping[str, range] = field(default_factory=dict)
    image: Image | None = None

    def table(self, rows: Rows) -> Tensor:
        """Returns rows of the table, float32 [B, len(names)], on the CPU."""
        index_B = torch.from_numpy(rows)
        columns = [self.values[index_B.to(self.values.device)].cpu()]
        if self.codes is not None:
            for codes_N, group in zip(
                self.codes.T, [*self.groups.values()][-self.codes.shape[1] :], strict=True
            ):
                columns.append((codes_N[index_B, None] == torch.arange(len(group))).float())
        return torch.cat(columns, dim=1)


@dataclass(frozen=True, eq=False)
class Scene:
    """One attacker's view of a finished run.

    ``gradients``: returns the batches of gradients that a passive party received. ``embeddings``:
    {sender: returns the batches of embeddings that the active party received}. ``labels``: the
    class of each row, int64 [N]; -1 for all rows in a regression. ``rows``: {split: rows}.
    ``encoder``: the attacker's own trained encoder, in evaluation mode. ``inputs``: returns the
    encoder's arguments for rows. ``make_encoder``: makes an untrained encoder of the same kind.
    ``columns``: {party: its columns}; only the judge and the auxiliary rows use them. ``owners``:
    {party: its encoder and rows}, for the judge. ``heard``: returns the messages from and to the
    attacker that phases allow to be overheard, in order. ``beginnings``: {passive party: how the
    training of its encoder begins}, for an active attacker. ``seed``: the seed of an attack's
    random draws. ``targets``: the scaled label of each row in a regression, float64 [N].
    ``encode_rows``: {party: returns the encodings of its rows with a key, uint8 [N, bytes]} of a
    fuzzy linkage, for the server. The server has only messages.
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
    encode_rows: Mapping[str, Callable[[bytes], Encodings]] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """The number of classes of the labels. Raises UnfitError for a regression."""
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

    ``party``: the owner of the images. ``rows``: (name, images [N, C, H, W] with pixels from 0 to
    1), the private images first. ``says``: a text about the similarity of the images.
    """

    party: str
    rows: tuple[tuple[str, Tensor], ...]
    says: str


@dataclass(frozen=True)
class Figure:
    """One result (metric value) of one attack in one run.

    ``of``: the target of the attack, ``labels`` or a column. ``knows``: the attacker's knowledge in
    addition to the messages. ``unit``: the metric: AUC, accuracy, R², SSIM, or an error (MSE), for
    which a lower value is a larger leak. ``value``: the leak; the median over batches. ``high``:
    the 95 % quantile over batches, or None. ``chance``, ``chance_high``: ``value`` and ``high`` for
    shuffled labels or a constant guess. ``baselines``: {attack without any message: its value}.
    ``batches``, ``skipped``: the numbers of judged and of skipped batches. ``place``: the phase and
    the exchange, if the attack reads only one; the table shows the exchange with the largest leak.
    ``detail``: whether another figure summarizes this one, or this one is only for comparison.
    ``note``: a sentence below the table. ``shown``: images to draw.
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
    """An attack of the leak meter.

    A module of ``vfl_leaks.attacks`` exports it as ``ATTACK``. The entry point of a plug-in is
    in the group ``vfl.attacks``.

    ``about``: a short description. ``by``: the role of the attacker; ``party`` means any party.
    ``play``: returns the figures, or raises UnfitError. ``reads``: the data that the attack needs:
    ``gradients`` or ``embeddings`` with known rows, a trained ``encoder``, shared ``weights`` that
    can be overheard, the ``encodings`` of a fuzzy linkage, or the kind of a phase, such as
    ``secureboost``. The attack is not played on a run without these data. '': the attack itself
    checks whether it can be played.
    """

    about: str
    by: Role | Literal["party"]
    play: Callable[[Scene], Sequence[Figure]]
    reads: str = ""
