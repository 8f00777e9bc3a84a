"""Scores ids of a served model whose method has its own way to score: in steps, each of which
asks the passive parties once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vfl_party.outbound.declared import Exchange

# As ``Preprocessor.cells`` gives them: numbers [N, F], NaN if missing, and codes of categories
# [N, K].
Cells = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Reply:
    """A passive party's message in a step.

    Args:
        known: whether it knows each id, and answers for it, [N].
        answered: in the method's own form, of all ids; without meaning for those that it does not
            know.
    """

    known: npt.NDArray[np.bool_]
    answered: bytes


# Asks parties, {passive party: what it is asked}, for answers of so many bytes. Returns the replies
# of those that answer in time.
Ask = Callable[[Mapping[str, bytes], int], Mapping[str, Reply]]


@dataclass(frozen=True)
class Stepped:
    """A passive party's answer in a step.

    Args:
        answered: in the method's own form, of all ids.
        times: how often it tells of each id, [N].
    """

    answered: bytes
    times: npt.NDArray[np.int64]


# Answers what is asked, [N ids], in one scoring, step by step. Raises ValueError that says what the
# active party may not ask, as the end of a sentence.
AnswerStep = Callable[[bytes], Stepped]


@dataclass(frozen=True)
class Outcome:
    """The active party's results for N ids.

    Args:
        outputs: the model's, [N, O]; without meaning for ids without a score.
        lost: {passive party: which ids have no score because they needed it, and it was not there,
            [N]}.
    """

    outputs: Tensor
    lost: Mapping[str, npt.NDArray[np.bool_]]


class Online(Protocol):
    """One party's side of such a model. Any thread may call it.

    ``exchange``: declares what crosses in a step, one tensor of bytes each way.
    ``bytes_of_row``: the most that a step has about one id.
    """

    exchange: Exchange
    bytes_of_row: int

    def score(self, cells: Cells | None, n: int, ask: Ask) -> Outcome:
        """Scores ``n`` ids: the active party. ``cells``: its own of them; None without features.

        The first step asks every passive party.
        """
        ...

    def answering(self, cells: Cells, known: npt.NDArray[np.bool_]) -> AnswerStep:
        """Begins to answer for the ids of one scoring: a passive party.

        ``cells``: its own of the ids that it answers for; ``known``: which of the N ids these are.
        """
        ...
