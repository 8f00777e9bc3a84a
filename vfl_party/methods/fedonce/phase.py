"""The local phase of FedOnce, the same for both roles: the party trains alone, with one of four
objectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.methods.fedonce.nat import Nat
from vfl_party.methods.fedonce.pca import Pca
from vfl_party.methods.fedonce.reconstruction import Reconstruction
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.models.training import own_optimizer
from vfl_party.phases.context import Party
from vfl_party.selfsup.local import LocalSelfSup
from vfl_party.selfsup.plan import make_plan
from vfl_party.selfsup.report import report
from vfl_party.selfsup.settings import SelfSupSettings
from vfl_party.selfsup.tower import build_tower


class EncoderLearner(Protocol):
    """Learns an encoder without labels. The job saves the encoder's weights, so ``state`` does not
    contain them.
    """

    def run_round(self, round_: int) -> RoundReport: ...
    def close(self) -> None: ...
    def state(self) -> Tree: ...
    def load_state(self, tree: Tree) -> None: ...


class ContrastiveLearner:
    """Learns with SimCLR's loss on two views of each row, as SS-VFL does; see
    ``vfl_party.selfsup``.
    """

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._phase, self._rounds = party, phase, settings.epochs
        self._warned: set[str] = set()
        selfsup = SelfSupSettings(
            ssl="simclr",
            rounds=settings.epochs,
            batch_size=settings.batch_size,
            projector=settings.projector,
            temperature=settings.temperature,
            optimizer=own_optimizer(party.recipe, phase, party.name, settings.optimizers)
            or settings.optimizer,
            augment=settings.augment,
        )
        plan = make_plan(selfsup, party.recipe.preset)
        tower = build_tower(party, phase, "local", party.models["encoder"], plan, shared=False)
        self._local = LocalSelfSup(
            party, phase, plan, tower, epochs=settings.epochs, split=settings.rows
        )

    def run_round(self, round_: int) -> RoundReport:
        """Trains for one round."""
        tick = self._party.ticker(self._phase, round_, self._rounds, self._local.steps(1))
        return report(self._party.name, {"local": self._local.run(round_, 1, tick)}, self._warned)

    def close(self) -> None:
        """Does nothing."""

    def state(self) -> Tree:
        """Returns the state for a checkpoint."""
        return self._local.state()

    def load_state(self, tree: Tree) -> None:
        """Restores a state that ``state`` returned."""
        self._local.load_state(tree)


_LEARNERS: dict[str, Callable[[Party, str, FedOnceSettings], EncoderLearner]] = {
    "nat": Nat,
    "pca": Pca,
    "reconstruction": Reconstruction,
    "contrastive": ContrastiveLearner,
}


class FedOnce(Phase):
    """Runs Alg. 1, lines 2 to 15. A party without features does nothing. The active party trains
    only if ``active`` is set.
    """

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: FedOnceSettings) -> None:
        self.name = name
        self.rounds = self.epochs = 1 if settings.objective == "pca" else settings.epochs
        learns = party.name != party.recipe.active.name or settings.active
        self._learner: EncoderLearner | None = None
        if learns and party.features is not None:
            self._learner = _LEARNERS[settings.objective](party, name, settings)

    def run_round(self, round_: int) -> RoundReport:
        return RoundReport(0) if self._learner is None else self._learner.run_round(round_)

    def finish(self) -> None:
        if self._learner is not None:
            self._learner.close()

    def state(self) -> Tree:
        return {} if self._learner is None else self._learner.state()

    def load_state(self, tree: Tree) -> None:
        if self._learner is not None:
            self._learner.load_state(tree)
