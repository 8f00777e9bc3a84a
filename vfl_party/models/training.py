"""Recipe settings of supervised phases: training budget, early stopping and parties' optimizers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import Field, PositiveInt

from vfl_common.config.base import KindName, Section
from vfl_common.config.models import OptimizerSettings, UnjudgedOptimizer
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError


class TrainingSettings(Section):
    """The training budget of a supervised phase, in epochs or in steps."""

    epochs: PositiveInt | None = None
    """Epochs over the training rows. Give this or ``steps``."""
    steps: PositiveInt | None = None
    """The minimum number of batches, rounded up to whole epochs. Use this for few rows."""
    batch_size: PositiveInt = 64
    """Rows of a batch."""
    optimizer: UnjudgedOptimizer = OptimizerSettings()
    """The optimizer of each party."""

    def model_post_init(self, _context: Any) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a phase needs either epochs or steps. Set one of them.")

    def epochs_over(self, rows: int) -> int:
        """Returns the number of epochs over ``rows`` training rows."""
        if self.steps is None:
            return self.epochs or 1
        whole_batches, remaining_rows = divmod(rows, self.batch_size)
        # A last batch of one row is dropped; see vfl_party.base.seeds.batches.
        has_partial_batch = remaining_rows > 1 or (
            remaining_rows == 1 and (whole_batches == 0 or self.batch_size == 1)
        )
        return -(-self.steps // max(1, whole_batches + has_partial_batch))


class EarlyStopping(Section):
    """Ends the phase when a metric on the validation rows has not improved for some time."""

    patience: PositiveInt = 5
    """The phase ends after this many validations without a better value. All parties then restore
    their best weights.
    """
    metric: KindName = "loss"
    """The metric on the validation rows."""


class OwnOptimizers(Section):
    """The key ``optimizers`` of a phase in which several parties train."""

    optimizers: dict[str, UnjudgedOptimizer] = Field(default_factory=dict)
    """{party: optimizer} for parties that do not use the phase's ``optimizer``."""


def own_optimizer(
    recipe: Recipe, phase: str, party: str, optimizers: Mapping[str, OptimizerSettings]
) -> OptimizerSettings | None:
    """Returns the optimizer that the recipe sets only for ``party``, or None.

    Raises InputError if ``optimizers`` names an unknown party.
    """
    names = [place.name for place in recipe.parties]
    for name in optimizers:
        if name not in names:
            suggestions = difflib.get_close_matches(name, names, n=1)
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: optimizers: unknown party {name!r}. Did you mean "
                f"{suggestions[0]!r}?"
                if suggestions
                else f"recipe: phases: {phase}: optimizers: unknown party {name!r}. Choose one of: "
                f"{', '.join(names)}.",
            )
    return optimizers.get(party)
