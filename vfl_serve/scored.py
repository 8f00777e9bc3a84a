"""The scores of a request, with the parties of each row and the reasons of missing parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# The state of a row. ``scored``: all parties took part. ``partly``: some parties took part.
# ``unknown``: no required party knows the id. ``refused``: the parties give less quality than
# requested. ``failed``: the score is not a number, or the active party's features cannot be read.
# ``incomplete``: the model cannot score without a missing party. ``unmeasured``: the quality
# without a missing party was never measured.
State = Literal["scored", "partly", "unknown", "refused", "failed", "incomplete", "unmeasured"]
# The reason why a party took no part in a row. ``not answered``: a passive party does not know the
# id, has refused it, or cannot use its features; it does not reveal which. ``unknown id``: the
# active party does not know the id. ``not needed``: parties hold different rows, and an earlier
# party has answered.
Why = Literal["not answered", "unknown id", "away", "late", "failed", "not needed"]


@dataclass(frozen=True)
class RequestPart:
    """The parties of a row's score.

    Args:
        parties: The parties that take part, in the recipe's order.
        missing: {missing party: the reason}.
        quality: The measured quality of the model with these parties; None if not measured.
        run: The id of the run that scores the row.
    """

    parties: tuple[str, ...]
    missing: Mapping[str, Why]
    quality: float | None = None
    run: str = ""


@dataclass(frozen=True)
class ServedScores:
    """The scores of N rows.

    Args:
        columns: {result column: values [N]}; undefined for rows without a score.
        state: The state of each row.
        parts: The different sets of parties of the rows.
        part_numbers: int64 [N], the index into ``parts`` of each row.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    state: Sequence[State]
    parts: Sequence[RequestPart]
    part_numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.state)

    def slice_rows(self, rows: slice) -> ServedScores:
        """Returns the scores of a slice of the rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return ServedScores(columns, self.state[rows], self.parts, self.part_numbers[rows])

    def with_run(self, run_id: str) -> ServedScores:
        """Returns the same scores with the id of the run that made them."""
        return replace(self, parts=[replace(part, run=run_id) for part in self.parts])

    def part(self, row: int) -> RequestPart:
        """Returns the parties of a row's score."""
        return self.parts[int(self.part_numbers[row])]

    @property
    def has_score(self) -> list[bool]:
        """Returns whether each row has a score."""
        return [state in ("scored", "partly") for state in self.state]
