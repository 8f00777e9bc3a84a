"""Code that both sides of FedCVT share: the check of a recipe, and the optimizer of a party's
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.bundle import StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.methods.fedcvt.batches import (
    CrossViewStep,
    FedCVTBatches,
    make_own_cycle,
    make_shortage_error,
)
from vfl_party.methods.fedcvt.encoders import TwoNetworks
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.models.training import build_optimizer, build_schedule, clip, own_optimizer
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_own


def check_recipe(recipe: Recipe, phase: str) -> None:
    """Raises InputError if FedCVT does not support the recipe's parties, task or combination."""
    if len(recipe.passives) != 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: fedcvt needs exactly one passive party (got "
            f"{len(recipe.passives)}). Correct the parties, or choose another method.",
        )
    if not recipe.active.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: fedcvt compares the views of both parties, but "
            f"{recipe.active.name} has no features. Give it features.",
        )
    if recipe.task.kind not in ("binary", "multiclass"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: fedcvt needs a binary or multiclass task (got "
            f"{recipe.task.kind}). Use splitnn instead.",
        )
    if recipe.model.combine != "concat":
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: phases: {phase}: fedcvt needs model.combine = "concat" (got '
            f'"{recipe.model.combine}"). Set model.combine = "concat".',
        )


class FedCVTTraining:
    """A party's batches, and the optimizer and schedule of its models.

    ``heads``: models that are discarded after the phase. Raises InputError if FedCVT does not
    support the recipe, the encoder or the rows.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: FedCVTSettings,
        heads: Mapping[str, nn.Module] | None = None,
    ) -> None:
        check_recipe(party.recipe, phase)
        if not isinstance(party.models["encoder"], TwoNetworks):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: an earlier phase, or the run to start from, hands on "
                "an encoder that does not consist of fedcvt's two networks. Put fedcvt first.",
            )
        self._party, self._phase = party, phase
        self.batches = FedCVTBatches(party, phase, settings)
        self._own = make_own_cycle(party, phase, settings)
        self._heads = nn.ModuleDict(heads or {})
        self._models = nn.ModuleDict({**party.models, **self._heads})
        norms = any(isinstance(module, _BatchNorm) for module in self._models.modules())
        if norms and self.batches.min_step_rows + self._own.size < 2:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {party.name}: batch normalization needs batches of at least 2 rows. Add "
                "rows, increase batch_size, or choose another encoder.",
            )
        self._params = list(self._models.parameters())
        party_optimizer = own_optimizer(party.recipe, phase, party.name, settings.optimizers)
        self._settings = settings.optimizer if party_optimizer is None else party_optimizer
        self._optimizer = build_optimizer(self._settings, self._params)
        self._schedule = build_schedule(self._settings, self._optimizer, self.batches.epochs)

    def steps(self, round_: int) -> list[CrossViewStep]:
        """Returns the steps of a round. Raises InputError if this party has too few rows of its
        own.
        """
        if self._own.is_too_short:
            raise make_shortage_error(self._party, self._phase, self._own)
        return self.batches.get_round_steps(round_, self._own)

    def train_mode(self) -> None:
        """Puts the models into training mode."""
        self._models.train()

    def zero_grad(self) -> None:
        """Clears the gradients."""
        self._optimizer.zero_grad()

    def step(self, *, last: bool) -> None:
        """Clips this party's gradient if the recipe sets ``clip_norm``, and updates the models.
        ``last``: whether an epoch ends.
        """
        clip(self._settings, self._params)
        self._optimizer.step()
        if last:
            self._schedule.step()

    def check(self, step: StepKey) -> None:
        """Raises InputError if this party's weights contain NaN or infinity. ``step``: the next
        step.
        """
        check_own(self._party, step, dict(self._models.state_dict()))

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        heads: dict[str, Tensor] = dict(self._heads.state_dict())
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "heads": heads,
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])
        self._heads.load_state_dict(tree["heads"])
