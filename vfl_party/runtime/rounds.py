"""The checkpoints between the rounds of one phase: when one is written, and when it must be on the
disk.

A checkpoint is due after every ``run.checkpoint_every`` rounds, but only if the party has changed
since the last one: rounds that leave it as it is (``Phase.skippable``) have none. The party offers
their labels all the same (``vfl_party.runtime.resume``), and may be far ahead of the others in such
rounds: checkpoints of them would push out the one that the others resume from.
"""

from __future__ import annotations

from collections.abc import Callable

from vfl_common.run_folder import RunFolder
from vfl_common.stages import label_of
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.runtime.generation import Generation
from vfl_party.runtime.outcome import RunOutcome


class PhaseRounds:
    """What one party keeps of the rounds of one phase.

    Args:
        phase, generation, folder: what runs, with what, and where its checkpoints are.
        outcome: counts the rounds.
        begin: the position of the phase's round 0.
        every: rounds between two checkpoints.
        before: called before a checkpoint is written.
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
        # Since the last checkpoint.
        self._changed = False
        # The round under way, and whether its report is counted.
        self._round, self._counted = 0, False

    def begins(self, round_: int) -> None:
        """Notes that a round begins."""
        self._round, self._counted = round_, False

    def save_early(self, report: RoundReport) -> None:
        """Writes the checkpoint that is due next, if the party does nothing until then: the round
        under way does not change it any more. Returns when it is on the disk. See ``Hooks``.
        """
        self.count(report)
        rounds = self._next_due()
        if rounds is not None:
            self._save(rounds, rounds, final=False)
            self.flush()

    def count(self, report: RoundReport) -> None:
        """Counts the round under way, once."""
        if self._counted:
            return
        self._counted = True
        self._outcome.add(self._phase.name, report)
        # A party that catches up, or is not drawn, has nothing new to keep.
        idle = self._phase.lenient and not report.steps
        self._changed |= not (idle or self._round in self._phase.skippable)

    def ends(self, report: RoundReport, *, done: bool) -> str:
        """Ends the round under way; ``done``: with it, the phase. Returns the label of its
        checkpoint; '' if none is written.
        """
        rounds = self._round + 1
        due = report.checkpoint or (rounds % self._every == 0 and self._changed)
        if self._folder.checkpoints is None or not (done or due):
            return ""
        # Who is alone may end a phase early without the others, who count all of its rounds.
        free, whole = self._phase.alone_from, self._phase.rounds
        alone = done and free is not None and self._round >= free
        self._save(whole if done else rounds, whole if alone else rounds, final=done)
        # What this party does next tells others that it is on the disk.
        if done or report.checkpoint:
            self.flush()
        return self._outcome.label

    def flush(self) -> None:
        """Waits until the last checkpoint is on the disk."""
        if self._folder.checkpoints is not None:
            self._folder.checkpoints.flush()

    def _next_due(self) -> int | None:
        """Returns the rounds that are done when a checkpoint is due next; None if the party changes
        before.
        """
        rounds = self._round + 1
        while rounds % self._every:
            if rounds not in self._phase.skippable:
                return None
            rounds += 1
        return rounds if rounds < self._phase.rounds else None

    def _save(self, position: int, rounds: int, *, final: bool) -> None:
        """Writes a checkpoint; ``position``: in the phase. ``final``: the phase keeps nothing."""
        if self._folder.checkpoints is None:
            return
        phase, outcome = self._phase, self._outcome
        outcome.label = label_of(self._begin + position, phase.name, rounds)
        with name_plugin_errors():
            state = {"job": self._generation.state(), "phase": {} if final else phase.state()}
        # Before the checkpoint's thread competes for the interpreter.
        self._before()
        self._folder.checkpoints.save_later(outcome.label, state | outcome.tree())
        self._changed = False
