"""A passive party's side: sends embeddings and receives their gradients."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vfl_common.bundle import StepKey, StepPassed
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.exchanges import (
    check_encoder,
    embedding,
    encode_columns,
    log_dcor_gradient,
    validation,
)
from vfl_party.methods.splitnn.local import Pipe
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining, VerdictReceiver
from vfl_party.models.training import backward
from vfl_party.phases.absence import Following
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import SplitScorer
from vfl_party.phases.sets import check as check_sets


class PassiveSplitNN(Phase):
    """Runs split training. One round is ``validate_every`` epochs, or ``checkpoint_steps`` steps of
    these.

    A step is one batch: this party sends embeddings, receives their gradients, and updates its
    encoder. Each optional feature of a recipe is an attribute, which is None by default.
    """

    def __init__(self, party: Party, name: str, settings: SplitNNSettings) -> None:
        self._party, self._settings = party, settings
        check_encoder(party, name, settings)
        check_sets(party, name, settings)
        self._training = OwnTraining(party, name, settings)
        self.name, self.rounds = name, self._training.batches.rounds
        self.epochs = self._training.batches.epochs
        self._embedding = party.exchanges.open_asking(
            name, embedding(settings), width=party.exchanges.width
        )
        # With a late policy, the other parties may continue without this party.
        self.lenient = self._embedding.lenient = settings.late_policy != "wait"
        order = [phase.name for phase in party.recipe.phases]
        self._following = Following(order, party.recipe.active.name) if self.lenient else None
        self._scorer = SplitScorer(party, name, validation(settings), following=self._following)
        self._verdicts = (
            VerdictReceiver(party, name, self._training) if settings.early_stopping else None
        )
        # The pipe handles several batches in flight, batches in parts, and updates between
        # exchanges.
        self._pipe: Pipe | None = None
        if not settings.plain:
            self._pipe = Pipe(party, name, settings, self._training, self._embedding)
        # The inputs of the next batch, which are prepared while the active party computes.
        self._next_inputs: tuple[Tensor, ...] = ()

    def run_round(self, round_: int) -> RoundReport:
        self._training.train_mode()
        if self._pipe is not None:
            steps, exchanges = self._pipe.run(round_, self.rounds)
            return self._report(StepKey(self.name, round_, exchanges), RoundReport(steps))
        party, training, num_steps = self._party, self._training, 0
        training.catch_up(round_)
        batches = training.batches.of(round_)
        self._next_inputs = ()
        for number, (rows, last) in enumerate(batches):
            following = batches[number + 1][0] if number + 1 < len(batches) else None
            # With ``rows.partial``, this party may hold no row of a batch.
            if len(rows):
                num_steps += self._step(StepKey(self.name, round_, number), rows, following)
            if last:
                training.end_epoch()
            party.hooks.tick(self.name, round_, self.rounds, number + 1, len(batches))
        num_own_batches = sum(len(rows) > 0 for rows, _ in batches)
        report = RoundReport(num_steps, passed=num_own_batches - num_steps)
        return self._report(StepKey(self.name, round_, len(batches)), report)

    def _step(self, step: StepKey, rows: Rows, following: Rows | None) -> bool:
        """Runs one step. Returns whether this party took part in the step. ``following``: the rows
        of the next step.
        """
        party, training = self._party, self._training
        if self._following is not None and self._following.is_over(step):
            self._next_inputs = ()
            return False
        x = self._next_inputs or training.inputs(rows, step.round, step.batch)
        z_BD = party.encode(*x)
        self._embedding.send(step, {"z": z_BD}, rows)
        # While the active party computes, this party prepares the update and the next batch.
        training.zero_grad()
        penalty_gradient_BD = None
        if self._settings.nopeek:
            penalty_gradient_BD = log_dcor_gradient(z_BD, encode_columns(x), self._settings.nopeek)
        self._next_inputs = ()
        if following is not None and len(following):
            self._next_inputs = training.inputs(following, step.round, step.batch + 1)
        try:
            dz_BD = self._embedding.receive(step, rows=z_BD.shape[0])["dz"]
        except StepPassed as passed:
            if self._following is None:
                raise
            self._following.skip(step, passed)
            return False
        backward(z_BD, dz_BD if penalty_gradient_BD is None else dz_BD + penalty_gradient_BD)
        training.step()
        return True

    def _report(self, step: StepKey, report: RoundReport) -> RoundReport:
        """Ends a round, with validation if it is due. ``step``: the next step."""
        if not self._training.batches.validates(step.round):
            return report
        steps = self._scorer.answer(self._party.rows.get_joint("validation"), step)
        if self._verdicts is None:
            return report
        is_last = self._verdicts.receive_verdict(
            StepKey(step.phase, step.round, step.batch + steps)
        )
        return replace(report, done=is_last)

    def state(self) -> Tree:
        return self._training.state() | (self._pipe.state() if self._pipe is not None else {})

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)
        if self._pipe is not None:
            self._pipe.load_state(tree)

    def finish(self) -> None:
        self._training.restore_best()
