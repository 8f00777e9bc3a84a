"""The passive party's side: sends representations and receives their gradients. The active party
computes the whole loss.
"""

from __future__ import annotations

import torch

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.methods.fedcvt.exchanges import VALIDATION, declare_representations
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.training import FedCVTTraining
from vfl_party.models.training import backward
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_own
from vfl_party.phases.scoring import SplitScorer


class PassiveFedCVT(Phase):
    """Trains with FedCVT. One round is ``validate_every`` epochs over the labelled rows."""

    def __init__(self, party: Party, name: str, settings: FedCVTSettings) -> None:
        self._party = party
        self._training = FedCVTTraining(party, name, settings)
        self.name, self.rounds = name, self._training.batches.rounds
        self.epochs = self._training.batches.epochs
        sizes = {"width": party.embedding_size, "own": settings.get_own_batch_size("passive")}
        self._representations = party.asking(name, declare_representations(settings), **sizes)
        self._validation = SplitScorer(party, name, VALIDATION)

    def run_round(self, round_: int) -> RoundReport:
        party, training, features = self._party, self._training, self._party.need_features()
        training.train_mode()
        steps = training.steps(round_)
        tick = party.ticker(self.name, round_, self.rounds, len(steps))
        for batch, rows in enumerate(steps):
            step = StepKey(self.name, round_, batch)
            r_BD = party.encode(*features.inputs(rows.rows))
            check_own(party, step, {"representations": r_BD.detach()})
            representations_by_name = {"aligned": r_BD[: rows.aligned], "own": r_BD[rows.aligned :]}
            tensor_names = self._representations.exchange.up.tensors
            self._representations.send(
                step, {name: representations_by_name[name] for name in tensor_names}, rows.rows
            )
            training.zero_grad()
            reply = self._representations.receive(step, rows=rows.aligned)
            dr_BD = torch.cat([reply[f"d_{name}"] for name in tensor_names])
            backward(r_BD, dr_BD)
            training.step(last=rows.last)
            tick()
        training.check(StepKey(self.name, round_, len(steps)))
        self._validation.answer(party.rows("validation"), StepKey(self.name, round_, len(steps)))
        return RoundReport(len(steps))

    def state(self) -> Tree:
        return self._training.state()

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)
