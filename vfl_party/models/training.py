"""The training budget of a supervised phase, when it ends early, and the optimizers of single
parties.
"""

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
    """The budget of a supervised phase: ``epochs`` or ``steps``."""

    epochs: PositiveInt | None = None
    """Epochs over the training rows. Give this or ``steps``."""
    steps: PositiveInt | None = None
    """For few rows: whole epochs with at least this many batches."""
    batch_size: PositiveInt = 64
    """Rows of a batch."""
    optimizer: UnjudgedOptimizer = OptimizerSettings()
    """The optimizer of each party."""

    def model_post_init(self, _context: Any) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("set either epochs or steps")

    def epochs_over(self, rows: int) -> int:
        """Returns the number of epochs over ``rows`` training rows."""
        if self.steps is None:
            return self.epochs or 1
        whole, rest = divmod(rows, self.batch_size)
        # The last batch may be dropped; see vfl_party.base.seeds.batches.
        a_step = rest > 1 or (rest == 1 and (whole == 0 or self.batch_size == 1))
        return -(-self.steps // max(1, whole + a_step))


class EarlyStopping(Section):
    """Ends the phase when a metric on the validation rows has not improved for some time."""

    patience: PositiveInt = 5
    """Validations without a better value after which the phase ends. All parties then restore their
    best weights.
    """
    metric: KindName = "loss"
    """The metric on the validation rows."""


class OwnOptimizers(Section):
    """Optimizers of single parties, of a phase in which several parties have one."""

    optimizers: dict[str, UnjudgedOptimizer] = Field(default_factory=dict)
    """The optimizers of single parties, by the party's name, each in place of ``optimizer``."""


def own_optimizer(
    recipe: Recipe, phase: str, party: str, optimizers: Mapping[str, OptimizerSettings]
) -> OptimizerSettings | None:
    """Returns the optimizer that the recipe sets for ``party`` only, or None.

    Raises InputError if ``optimizers`` names an unknown party.
    """
    names = [place.name for place in recipe.parties]
    for name in optimizers:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: optimizers: unknown party {name!r}. Did you mean "
                f"{near[0]!r}?"
                if near
                else f"recipe: phases: {phase}: optimizers: unknown party {name!r}. Choose one of: "
                f"{', '.join(names)}.",
            )
    return optimizers.get(party)
