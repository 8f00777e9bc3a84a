"""The passive side: embeddings out, their gradients back."""

from __future__ import annotations

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_party.context import Party
from vfl_party.exchange import expect
from vfl_party.methods.splitnn.batches import numbered
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import BEST, STOP, VERDICT, OwnTraining
from vfl_party.phase import Phase, RoundReport, Tree
from vfl_party.scoring import send_embeddings


class PassiveSplitNN(Phase):
    """One round is ``validate_every`` epochs."""

    def __init__(self, party: Party, name: str, settings: SplitNNSettings) -> None:
        self._party, self._settings = party, settings
        self._training = OwnTraining(party, name, settings)
        self.name, self.rounds = name, self._training.rounds

    def run_round(self, round_: int) -> RoundReport:
        party, training = self._party, self._training
        link, features = party.need_link(), party.need_features()
        training.train_mode()
        steps = numbered(training.batches(round_))
        inputs = features.inputs(steps[0][0]) if steps else ()
        for batch, (_, last) in enumerate(steps):
            step = StepKey(self.name, round_, batch)
            z_BD = party.encode(*inputs)
            link.send(step, Kind.EMBEDDING, {"z": z_BD})
            # While the active party computes:
            training.zero_grad()
            if batch + 1 < len(steps):
                inputs = features.inputs(steps[batch + 1][0])
            reply = link.receive(step, expect(Kind.GRADIENT, dz=(torch.float32, tuple(z_BD.shape))))
            z_BD.backward(reply["dz"])  # type: ignore[no-untyped-call]
            training.step()
            if last:
                training.end_epoch()
            party.tick(self.name, round_, self.rounds, batch + 1, len(steps))
        after = send_embeddings(party, self.name, round_, len(steps), party.rows("validation"))
        return RoundReport(len(steps), done=self._verdict(round_, after))

    def _verdict(self, round_: int, batch: int) -> bool:
        """Whether the active party ends the phase here."""
        if self._settings.early_stopping is None:
            return False
        reply = self._party.need_link().swap(StepKey(self.name, round_, batch), Kind.ACK, {}, VERDICT)
        verdict = int(reply["verdict"][0])
        if verdict & BEST:
            self._training.keep_as_best()
        return bool(verdict & STOP)

    def state(self) -> Tree:
        return self._training.state()

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)

    def finish(self) -> None:
        self._training.restore_best()
