"""A passive party's side, which is the paper's client: sends the latents of two views, receives the
gradient of one, and averages its bottom model with other parties.
"""

from __future__ import annotations

from functools import partial

import torch

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.methods.mocosfl.exchanges import declare_bottoms, declare_handout, declare_latents
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import (
    StepPlan,
    build_halves,
    get_averaged_parameters,
    make_moving_average,
)
from vfl_party.methods.mocosfl.training import TrainedHalf
from vfl_party.methods.mocosfl.views import AugmentedViews
from vfl_party.models.training import backward
from vfl_party.outbound.exchange import Asking
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_own
from vfl_party.selfsup.augment import Inputs
from vfl_party.selfsup.losses import ema_update


class PassiveMocoSFL(Phase):
    """Trains the bottom model, which is the party's encoder. One round is the part of an epoch up
    to the next average.
    """

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._views = AugmentedViews(party, name, settings)
        self._plan = StepPlan.of(party, name, settings)
        released = party.recipe.preset == "released"
        self._bottom = party.models["encoder"]
        self._half = TrainedHalf(
            self._bottom, settings.of_bottoms, settings.epochs, by_batch=released
        )
        self._momentum = make_moving_average(self._bottom)
        self._averaged = get_averaged_parameters(self._bottom, None if released else self._momentum)
        channels, height, width = build_halves(party.recipe, settings).latent
        self._sizes = {"channels": channels, "height": height, "width": width}
        self._latents = party.asking(
            name, declare_latents(settings), rows=settings.batch_size, **self._sizes
        )
        self._handout = (
            party.asking(name, declare_handout(self._bottom)) if self._plan.hands_out else None
        )
        self._bottoms = (
            None
            if settings.frozen
            else party.asking(name, declare_bottoms(self._averaged, self._plan.draw))
        )
        self.skippable = self._plan.idle(party.name)

    def run_round(self, round_: int) -> RoundReport:
        plan, is_drawn = self._plan, self._party.name in self._plan.participants(round_)
        report = RoundReport(len(plan.numbers(round_)) if is_drawn else 0)
        # Start with the bottom model of earlier phases or of another run.
        if round_ == 0:
            if self._handout is not None:
                self._bottom.load_state_dict(self._handout.swap(StepKey(self.name, 0, 0), {}))
            self._momentum.load_state_dict(self._bottom.state_dict())
            advise(self._party.show, plan.warn_of_long_epoch(self._party.name))
        if is_drawn:
            if not self._settings.frozen:
                self._half.catch_up(round_ // self._settings.averages_per_epoch)
            self._run_steps(round_, report.steps)
        if self._bottoms is not None:
            self._average(self._bottoms, report, round_, gives=is_drawn)
        return report

    def _run_steps(self, round_: int, steps: int) -> None:
        party = self._party
        for num_done, (step, number) in enumerate(self._plan.steps(round_), 1):
            rows, (v1, v2) = self._views.rows(number), self._views.make_views(number)
            if self._settings.frozen:
                with torch.no_grad():
                    views_latents = {"q": self._bottom(*v1), "k": self._bottom(*v2)}
                check_own(party, step, views_latents)
                self._latents.swap(step, views_latents, rows)
            else:
                self._train(step, rows, v1, v2)
            party.tick(self.name, round_, self.rounds, num_done, steps)

    def _train(self, step: StepKey, rows: Rows, v1: Inputs, v2: Inputs) -> None:
        with torch.no_grad():
            ema_update(self._momentum, self._bottom, self._settings.momentum)
            k = self._momentum(*v2)
        q = self._bottom(*v1)
        check_own(self._party, step, {"q": q.detach(), "k": k})
        self._latents.send(step, {"q": q, "k": k}, rows)
        self._half.zero_grad()
        backward(q, self._latents.receive(step)["dq"])
        self._half.step()

    @torch.no_grad()
    def _average(self, weights: Asking, report: RoundReport, round_: int, *, gives: bool) -> None:
        """Sends the bottom model to the server if this party has trained it, and loads the mean if
        this party takes part in the next round. The optimizer's state is not averaged.
        """
        step, receives = (
            StepKey(self.name, round_, 0),
            self._party.name in self._plan.takers(round_),
        )
        if gives:
            check_own(self._party, step, self._averaged)
        if gives and not receives:
            # The other parties need nothing more from this party, and may be far ahead when it
            # returns.
            weights.give(step, self._averaged, partial(self._party.settled, report))
        if not receives:
            return
        mean = weights.swap(step, self._averaged) if gives else weights.take(step)
        for name, parameter in self._averaged.items():
            parameter.copy_(mean[name])

    def state(self) -> Tree:
        return {"half": self._half.state(), "momentum": dict(self._momentum.state_dict())}

    def load_state(self, tree: Tree) -> None:
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])
