"""The training budget of a supervised phase."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings


class TrainingSettings(Section):
    """The budget of a supervised phase: ``epochs`` or ``steps``."""

    epochs: PositiveInt | None = None
    """Epochs over the training rows. Give this or ``steps``."""
    steps: PositiveInt | None = None
    """For few rows: whole epochs with at least this many batches."""
    batch_size: PositiveInt = 64
    """Rows of a batch."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of each party."""

    def model_post_init(self, _context: Any) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")

    def epochs_over(self, rows: int) -> int:
        """Returns the number of epochs over ``rows`` training rows."""
        if self.steps is None:
            return self.epochs or 1
        whole, rest = divmod(rows, self.batch_size)
        # See vfl_party.base.seeds.batches.
        a_step = rest > 1 or (rest == 1 and (whole == 0 or self.batch_size == 1))
        return -(-self.steps // max(1, whole + a_step))
