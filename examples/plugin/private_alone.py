"""A method: the active party trains on its own columns with differential privacy; the others wait.

What it shows is how a method spends the budget of a run: DP-SGD, planned before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt

from vfl.api import (
    DpSettings,
    Method,
    Party,
    Phase,
    PrivatePhase,
    PrivateSteps,
    RoundReport,
    Rows,
    Section,
    Traffic,
    combine,
    loss_fn,
)


class PrivateSettings(Section):
    """The phase's keys besides kind and name."""

    epochs: PositiveInt
    batch_size: PositiveInt = 64
    lr: float = 0.1
    dp: DpSettings


class Trains(Phase):
    """The active side."""

    def __init__(self, party: Party, name: str, settings: PrivateSettings) -> None:
        self.name, self.rounds, self.party, self.settings = name, settings.epochs, party, settings
        self.models = torch.nn.ModuleDict(party.models)
        optimizer = torch.optim.SGD(self.models.parameters(), lr=settings.lr)
        # It refuses a model that DP-SGD cannot train, and has the noise that the plan asks for.
        self.steps = PrivateSteps(
            party.need_privacy(),
            name,
            party.name,
            self.models,
            optimizer,
            party.rows.get("train"),
            settings.batch_size,
            settings.dp.max_grad_norm,
        )

    def loss(self, rows: Rows) -> torch.Tensor:
        party, (_, targets) = self.party, self.party.rows.need_labels()
        z_BD = self.models["encoder"](*party.rows.need_features().inputs(rows))
        # What the absent parties would send counts as zero.
        nothing = [torch.zeros_like(z_BD)] * len(party.recipe.passives)
        outputs = self.models["top"](combine(party.recipe.model.combine, [z_BD, *nothing]))
        return loss_fn(party.recipe.task)(outputs, party.rows.take(targets, rows))

    def run_round(self, round_: int) -> RoundReport:
        self.models.train()
        # It begins, and so draws the key of its noise, with the first round.
        batches = list(self.steps.batches(round_))
        for rows in batches:
            self.steps.step(rows, self.loss)
        return RoundReport(len(batches), note=self.steps.note)

    def finish(self) -> None:
        self.steps.close()

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps.state()}

    def load_state(self, tree: dict[str, Any]) -> None:
        self.steps.load_state(tree["steps"])


class Waits(Phase):
    """A passive side: its rounds are empty."""

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: PrivateSettings) -> None:
        _ = party
        self.name, self.rounds = name, settings.epochs

    def run_round(self, round_: int) -> RoundReport:
        _ = round_
        return RoundReport(0)


class PrivateAlone(Method[PrivateSettings]):
    def private(
        self, phase: str, settings: PrivateSettings, recipe: Any, rows: int
    ) -> PrivatePhase | None:
        """Returns who trains with privacy, and for how long: every party plans the same budget."""
        _ = rows
        who = (recipe.active.name,)
        return PrivatePhase(phase, settings.dp, who, settings.batch_size, settings.epochs)

    def traffic(self, party: Party, phase: str, settings: PrivateSettings) -> Traffic:
        """Says that nothing crosses."""
        _ = party, phase, settings
        return Traffic()


METHOD = PrivateAlone(PrivateSettings, Trains, Waits)
