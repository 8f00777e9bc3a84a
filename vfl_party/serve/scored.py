"""What a request gets back: a score for each row, who took part in it, and why others did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# Outcome of a row: all parties took part, some did, or no needed party knows the id. ``refused``:
# the parties that took part give less quality than requested. ``failed``: what they sent gives no
# number, or the active party's own features cannot be had. ``incomplete``: the model needs a party
# that is missing, and has nothing in its place. ``unmeasured``: something takes the place of a
# party that is missing, and nobody has measured how good the scores are then.
State = Literal["scored", "partly", "unknown", "refused", "failed", "incomplete", "unmeasured"]
# The reason why a party took no part in a row. ``not answered``: a passive party does not know the
# id, has refused it, or cannot use its features; it does not tell which. ``unknown id``: the active
# party itself does not know the id. ``not needed``: a party before it has answered, and the parties
# hold different rows.
Why = Literal["not answered", "unknown id", "away", "late", "failed", "not needed"]


@dataclass(frozen=True)
class RequestPart:
    """Who takes part in a row.

    Args:
        parties: those that do, in the recipe's order.
        missing: {party that does not: why}.
        quality: what was measured of the model with these parties; None: nothing was.
        run: the id of the run that scores the row.
    """

    parties: tuple[str, ...]
    missing: Mapping[str, Why]
    quality: float | None = None
    run: str = ""


@dataclass(frozen=True)
class ServedScores:
    """The scores of N rows.

    Args:
        columns: {column of a result: its values, [N]}; without meaning for rows without a score.
        state: of each row.
        parts: who takes part; rows share them.
        part_numbers: the number of each row's part.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    state: Sequence[State]
    parts: Sequence[RequestPart]
    part_numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.state)

    def slice_rows(self, rows: slice) -> ServedScores:
        """Returns the scores of some rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return ServedScores(columns, self.state[rows], self.parts, self.part_numbers[rows])

    def with_run(self, run_id: str) -> ServedScores:
        """Returns the same scores, as those of a run."""
        return replace(self, parts=[replace(part, run=run_id) for part in self.parts])

    def part(self, row: int) -> RequestPart:
        """Returns who takes part in a row."""
        return self.parts[int(self.part_numbers[row])]

    @property
    def has_score(self) -> list[bool]:
        """Whether each row has a score."""
        return [state in ("scored", "partly") for state in self.state]
