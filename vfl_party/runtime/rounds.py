"""Decides when a checkpoint is written between the rounds of a phase, and when it must be on the
disk.

A checkpoint is due after every ``run.checkpoint_every`` rounds, but only if the party has changed
since its last checkpoint. Rounds that leave the party unchanged (``Phase.skippable``) have no
checkpoint. The party still offers the labels of these rounds (``vfl_party.runtime.resume``). It may
be far ahead of the others in such rounds, so checkpoints there would push out the checkpoint from
which the others resume.
"""

from __future__ import annotations

from collections.abc import Callable

from vfl_common.run_folder import RunFolder
from vfl_common.stages import make_label
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.runtime.generation import Generation
from vfl_party.runtime.outcome import RunOutcome


class PhaseRounds:
    """Counts the rounds of one phase at one party, and writes the checkpoints.

    Args:
        phase: The phase that runs.
        generation: The party's models in this generation.
        folder: The run's folder, with the checkpoints.
        outcome: The run's results so far, to which the rounds are added.
        begin: The position of the phase's round 0.
        every: The number of rounds between two checkpoints.
        before: Called before a checkpoint is written.
    """

    def __init__(
        self,
        phase: Phase,
        generation: Generation,
        folder: RunFolder,
        outcome: RunOutcome,
        begin: int,
        every: int,
        before: Callable[[], None],
    ) -> None:
        self._phase, self._generation, self._folder = phase, generation, folder
        self._outcome, self._begin, self._every, self._before = outcome, begin, every, before
        # Whether the party has changed since the last checkpoint.
        self._changed = False
        # The current round, and whether its report has been counted.
        self._round, self._counted = 0, False

    def begin_round(self, round_: int) -> None:
        """Records that a round begins."""
        self._round, self._counted = round_, False

    def save_early(self, report: RoundReport) -> None:
        """Writes the next due checkpoint early, if no later round changes the party before it is
        due. The current round must not change the party any more. Returns once the checkpoint is on
        the disk. See ``Hooks``.
        """
        self.count(report)
        rounds = self._next_due()
        if rounds is not None:
            self._save(rounds, rounds, final=False)
            self.flush()

    def count(self, report: RoundReport) -> None:
        """Counts the current round. A second call for the same round has no effect."""
        if self._counted:
            return
        self._counted = True
        self._outcome.add(self._phase.name, report)
        # A party that catches up, or is not drawn, does not change.
        is_idle = self._phase.lenient and not report.steps
        self._changed |= not (is_idle or self._round in self._phase.skippable)

    def end_round(self, report: RoundReport, *, done: bool) -> str:
        """Ends the current round. ``done``: Whether the phase ends too. Returns the label of the
        written checkpoint; '' if none is written.
        """
        rounds = self._round + 1
        is_due = report.checkpoint or (rounds % self._every == 0 and self._changed)
        if self._folder.checkpoints is None or not (done or is_due):
            return ""
        # A party that is alone may end a phase early, but the others count all rounds of the phase.
        alone_from, all_rounds = self._phase.alone_from, self._phase.rounds
        is_alone = done and alone_from is not None and self._round >= alone_from
        self._save(all_rounds if done else rounds, all_rounds if is_alone else rounds, final=done)
        # From the next message of this party, others conclude that the checkpoint is on the disk.
        if done or report.checkpoint:
            self.flush()
        return self._outcome.label

    def flush(self) -> None:
        """Waits until the last checkpoint is on the disk."""
        if self._folder.checkpoints is not None:
            self._folder.checkpoints.flush()

    def _next_due(self) -> int | None:
        """Returns the number of finished rounds at the next due checkpoint; None if the party
        changes before it.
        """
        rounds = self._round + 1
        while rounds % self._every:
            if rounds not in self._phase.skippable:
                return None
            rounds += 1
        return rounds if rounds < self._phase.rounds else None

    def _save(self, position: int, rounds: int, *, final: bool) -> None:
        """Writes a checkpoint. ``position``: The next round in the phase. ``final``: Whether the
        phase has ended, so that its state is not kept.
        """
        if self._folder.checkpoints is None:
            return
        phase, outcome = self._phase, self._outcome
        outcome.label = make_label(self._begin + position, phase.name, rounds)
        with name_plugin_errors():
            state = {"job": self._generation.state(), "phase": {} if final else phase.state()}
        # The callback runs before the checkpoint's thread, which would slow it down.
        self._before()
        self._folder.checkpoints.save_later(outcome.label, state | outcome.tree())
        self._changed = False
