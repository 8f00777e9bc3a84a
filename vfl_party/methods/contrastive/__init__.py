"""Local contrastive pretraining without any exchange, the first phase of SS-VFL (Castiglia et al.
2022).

SS-VFL-I continues with one upload of the frozen representations (``head``), SS-VFL-C with split
training (``splitnn``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveInt

from vfl_common.config.models import Probability, Temperature
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.models.training import own_optimizer
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method, MethodFacts
from vfl_party.selfsup.settings import SelfSupSettings, make_plan
from vfl_party.selfsup.towers import LocalSelfSup, build_tower, report


class ContrastiveSettings(SelfSupSettings):
    """One round is one epoch over all of a party's training rows.

    ``simclr`` is the paper's loss (Eq. 2), with negatives from the batch. ``moco`` is the loss of
    the released code, with negatives from a queue.
    """

    rounds: PositiveInt = 200
    """The number of rounds of the phase. Default: the paper's 200 epochs, before 500 epochs on
    labelled rows.
    """
    ssl: Literal["simclr", "moco"] = "simclr"
    """The loss: ``simclr`` takes negatives from the batch, ``moco`` from a queue."""
    temperature: Temperature = 0.2
    """The temperature, by which cosine similarities are divided."""
    momentum: Probability | None = 0.999
    """``moco``: the share of its weights that the target encoder keeps in each step."""


class Contrastive(Phase):
    """Runs LocalCL (Alg. 4) at a party of either role. A party without features does nothing."""

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: ContrastiveSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._local = party, None
        self._warned: set[str] = set()
        party_optimizer = own_optimizer(party.recipe, name, party.name, settings.optimizers)
        if party.rows.features is not None:
            plan = make_plan(settings, party.recipe.preset, own=party_optimizer)
            tower = build_tower(party, name, "local", party.models["encoder"], plan, shared=False)
            self._local = LocalSelfSup(party, name, plan, tower, epochs=settings.rounds)

    def run_round(self, round_: int) -> RoundReport:
        if self._local is None:
            return RoundReport(0)
        tick = self._party.hooks.make_ticker(self.name, round_, self.rounds, self._local.steps(1))
        return report(self._party.name, {"local": self._local.run(round_, 1, tick)}, self._warned)

    def state(self) -> Tree:
        return {} if self._local is None else self._local.state()

    def load_state(self, tree: Tree) -> None:
        if self._local is not None:
            self._local.load_state(tree)


class ContrastiveLearning(Method[ContrastiveSettings]):
    """SS-VFL pretraining: every party trains alone. The preset decides the augmentations."""

    def facts(self, settings: ContrastiveSettings) -> MethodFacts:
        _ = settings
        return MethodFacts(own_sizes=True, follows=None, no_partial="", one_process="")

    def traffic(self, party: Party, phase: str, settings: ContrastiveSettings) -> Traffic:
        _ = party, phase, settings
        return Traffic()

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        _ = written
        return True


METHOD = ContrastiveLearning(ContrastiveSettings, Contrastive, Contrastive)
