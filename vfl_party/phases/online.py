"""Defines the interface for scoring by id with a served model whose method has its own way to
score. Scoring runs in steps, each of which asks the passive parties once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vfl_party.outbound.declared import Exchange

# The result of ``Preprocessor.cells``: numbers [N, F], NaN if missing, and codes of categories [N,
# K].
Cells = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Reply:
    """A passive party's message in a step.

    Args:
        known: bool [N], whether the party knows each id and answers for it.
        answered: The answer for all ids, in the method's own format. Its values for unknown ids
            have no meaning.
    """

    known: npt.NDArray[np.bool_]
    answered: bytes


# Called with {passive party: request} and the number of bytes of an answer. Returns {passive party:
# reply} for the parties that answer in time.
Ask = Callable[[Mapping[str, bytes], int], Mapping[str, Reply]]


@dataclass(frozen=True)
class StepAnswer:
    """A passive party's answer in a step.

    Args:
        answered: The answer for all ids, in the method's own format.
        times: int64 [N], how often the answer reveals something about each id.
    """

    answered: bytes
    times: npt.NDArray[np.int64]


# Answers one request about N ids; called once for each step of a scoring. Raises ValueError, with
# the end of a sentence, if the active party may not ask this.
AnswerStep = Callable[[bytes], StepAnswer]


@dataclass(frozen=True)
class Outcome:
    """The active party's results for N ids.

    Args:
        outputs: The model's outputs, [N, O]. The values for ids without a score have no meaning.
        lost: {passive party: bool [N], which ids have no score because this party was needed and
            missing}.
    """

    outputs: Tensor
    lost: Mapping[str, npt.NDArray[np.bool_]]


class Online(Protocol):
    """One party's side of scoring by id. Any thread may call it.

    ``exchange``: Declares the exchange of a step, one tensor of bytes in each direction.
    ``bytes_of_row``: The maximum number of bytes about one id in a step.
    """

    exchange: Exchange
    bytes_of_row: int

    def score(self, cells: Cells | None, n: int, ask: Ask) -> Outcome:
        """Scores ``n`` ids at the active party. ``cells``: The active party's cells for these ids;
        None without features.

        The first step asks every passive party.
        """
        ...

    def answering(self, cells: Cells, known: npt.NDArray[np.bool_]) -> AnswerStep:
        """Returns the function that answers the steps of one scoring at a passive party.

        ``cells``: This party's cells for the ids that it knows. ``known``: bool [N], which ids it
        knows.
        """
        ...
