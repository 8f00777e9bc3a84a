"""The passive side: embeddings out, their gradients back."""

from __future__ import annotations

from vfl_common.bundle import StepKey
from vfl_common.link import StepPassed
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.dcor import columns_of, gradient
from vfl_party.methods.splitnn.exchanges import BEST, STOP, VERDICT, embedding, validation
from vfl_party.methods.splitnn.mid import check_encoder
from vfl_party.methods.splitnn.pipe import Pipe
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import OwnTraining
from vfl_party.models.backward import backward
from vfl_party.phases.absence import Following
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import send_embeddings


class PassiveSplitNN(Phase):
    """One round is ``validate_every`` epochs, or ``checkpoint_steps`` steps of them."""

    def __init__(self, party: Party, name: str, settings: SplitNNSettings) -> None:
        self._party, self._settings = party, settings
        check_encoder(party, name, settings)
        self._training = OwnTraining(party, name, settings)
        self.name, self.rounds = name, self._training.batches.rounds
        width = party.embedding_size
        self._embedding = party.asking(name, embedding(settings), width=width)
        self._validation = party.asking(name, validation(settings), width=width)
        self._verdicts = (
            party.asking(name, VERDICT) if settings.early_stopping is not None else None
        )
        order = [phase.name for phase in party.recipe.phases]
        self.lenient = settings.late_policy != "wait"
        self._embedding.lenient = self._validation.lenient = self.lenient
        self._following = Following(order, party.recipe.active.name) if self.lenient else None
        self._pipe = (
            None if settings.plain else Pipe(party, name, settings, self._training, self._embedding)
        )

    def run_round(self, round_: int) -> RoundReport:
        return (
            self._run_plain(round_) if self._pipe is None else self._run_piped(self._pipe, round_)
        )

    def _run_piped(self, pipe: Pipe, round_: int) -> RoundReport:
        self._training.train_mode()
        steps, exchanges = pipe.run(round_, self.rounds)
        if not self._training.batches.validates(round_):
            return RoundReport(steps)
        after = send_embeddings(
            self._party, self._validation, round_, exchanges, self._party.rows("validation")
        )
        return RoundReport(steps, done=self._verdict(round_, after))

    def _run_plain(self, round_: int) -> RoundReport:
        party, training, nopeek = self._party, self._training, self._settings.nopeek
        features = party.need_features()
        training.train_mode()
        training.catch_up(round_)
        steps, following, done = training.batches.of(round_), self._following, 0
        inputs = features.inputs(steps[0][0]) if steps else ()
        for batch, (rows, last) in enumerate(steps):
            step = StepKey(self.name, round_, batch)
            if following is not None and following.is_over(step):
                inputs = ()
            else:
                x = inputs or features.inputs(rows)
                z_BD = party.encode(*x)
                self._embedding.send(step, {"z": z_BD})
                # The active party computes meanwhile:
                training.zero_grad()
                own_BD = gradient(z_BD, columns_of(x), nopeek) if nopeek else None
                if batch + 1 < len(steps):
                    inputs = features.inputs(steps[batch + 1][0])
                try:
                    reply = self._embedding.receive(step, rows=z_BD.shape[0])
                    dz_BD = reply["dz"] if own_BD is None else reply["dz"] + own_BD
                    backward(z_BD, dz_BD)
                    training.step()
                    done += 1
                except StepPassed as passed:
                    if following is None:
                        raise
                    following.skip(step, passed)
            if last:
                training.end_epoch()
            party.tick(self.name, round_, self.rounds, batch + 1, len(steps))
        if not training.batches.validates(round_):
            return RoundReport(done, passed=len(steps) - done)
        after = send_embeddings(
            party, self._validation, round_, len(steps), party.rows("validation"), following
        )
        return RoundReport(done, done=self._verdict(round_, after), passed=len(steps) - done)

    def _verdict(self, round_: int, batch: int) -> bool:
        """Asks whether the active party ends the phase here."""
        if self._verdicts is None:
            return False
        reply = self._verdicts.swap(StepKey(self.name, round_, batch), {})
        verdict = int(reply["verdict"][0])
        if verdict & BEST:
            self._training.keep_as_best()
        return bool(verdict & STOP)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        return self._training.rows_at(exchange, step)

    def state(self) -> Tree:
        return self._training.state() | (self._pipe.state() if self._pipe is not None else {})

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)
        if self._pipe is not None:
            self._pipe.load_state(tree)

    def finish(self) -> None:
        self._training.restore_best()
