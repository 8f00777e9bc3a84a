"""One party's results of a run so far. They are stored in its checkpoints and sent in its
report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vfl_common.rpc.messages import PartyReport
from vfl_common.summary import Absence, Arithmetic, PhaseTimes, Worth
from vfl_common.text import to_json
from vfl_party.base.phase import RoundReport, Tree
from vfl_party.runtime.generation import Statement


@dataclass
class RunOutcome:
    """The results of a run, for this party. ``metrics``: {split: {name: value}}."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    summary_json: str = ""
    # The label of the last checkpoint.
    label: str = ""
    # Parties that the model was trained without.
    without: tuple[str, ...] = ()
    # {phase: the steps that were computed without a party}.
    absences: dict[str, tuple[Absence, ...]] = field(default_factory=dict)
    # The parties' contributions to the result, from the last phase that measures them.
    worth: Worth | None = None
    # The number of rounds whose updates this party has lost, or missed while it was away.
    skipped: int = 0
    # The row counts of PartyReport.
    rows: int = 0
    common_rows: int = 0
    # Whether this party has returned and not yet reached the current step.
    catches_up: bool = False
    # The arithmetic of this process; in a checkpoint, of the process that wrote it.
    arithmetic: Arithmetic | None = None

    @classmethod
    def restore(cls, tree: Tree, label: str) -> RunOutcome:
        """Returns the outcome that the checkpoint ``tree`` with ``label`` contains."""
        return cls(
            metrics=dict(tree["metrics"]),
            steps=tree["steps"],
            label=label,
            without=tuple(tree.get("without", ())),
            absences={
                phase: tuple(Absence(**item) for item in items)
                for phase, items in tree.get("absences", {}).items()
            },
            worth=Worth(**tree["worth"]) if tree.get("worth") else None,
            skipped=tree.get("skipped", 0),
            arithmetic=Arithmetic(**tree["arithmetic"]) if tree.get("arithmetic") else None,
        )

    def tree(self) -> dict[str, Any]:
        """Returns the outcome's state for a checkpoint; see ``restore``."""
        return {
            "steps": self.steps,
            "metrics": self.metrics,
            "without": self.without,
            "skipped": self.skipped,
            "worth": None if self.worth is None else self.worth.model_dump(),
            "arithmetic": None if self.arithmetic is None else self.arithmetic.model_dump(),
            "absences": {
                name: [item.model_dump() for item in items] for name, items in self.absences.items()
            },
        }

    def add(self, phase: str, report: RoundReport) -> None:
        """Adds the results of one round of ``phase``."""
        self.steps += report.steps
        if self.catches_up:
            self.skipped += bool(report.passed)
            self.catches_up = not report.steps
        self.metrics |= report.kept or report.metrics
        self.without = tuple(dict.fromkeys((*self.without, *report.without)))
        self.worth = report.worth or self.worth
        if report.absences:
            self.absences[phase] = report.absences

    def report(
        self, statement: Statement, wall_s: float, times: Sequence[PhaseTimes]
    ) -> PartyReport:
        """Returns the report for the server at the end of the run. The program adds further
        fields.
        """
        absences = [item.model_dump() for phase in self.absences.values() for item in phase]
        return PartyReport(
            self.metrics,
            self.steps,
            wall_s,
            privacy_json=statement.privacy_json,
            exchanges_json=statement.exchanges_json,
            without=self.without,
            absences_json=to_json(absences),
            skipped_rounds=self.skipped,
            rows=statement.rows,
            common_rows=statement.common_rows,
            times_json=to_json([phase.model_dump() for phase in times]),
            follows_preset=statement.follows_preset,
            worth_json="" if self.worth is None else self.worth.model_dump_json(),
            arithmetic_json="" if self.arithmetic is None else self.arithmetic.model_dump_json(),
        )
