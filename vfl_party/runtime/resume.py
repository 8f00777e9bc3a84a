"""Determines the checkpoint labels at which a party can resume a run, from its checkpoints and its
plan.

Positions. The rounds of all phases are numbered consecutively. A checkpoint's label is
``<position>.<phase>.<round>`` with the position zero-padded, so that labels sort, and parties
compare labels without knowing each other's phases.

A party keeps the rounds that it computed alone (``Phase.alone_from``): it offers their labels as
resume points too, although it has no checkpoints there. For example, A and B are both alone from
position 2, and the run resumes at 3:

    A    has a checkpoint at 5    offers 5 4 3 2    resumes at 5
    B    has a checkpoint at 3    offers 3 2        resumes at 3, and repeats 3 and 4

If a party is alone until the end of the run, the run does not need it to resume at such a label, so
the party may leave.

A party offers '', the run's beginning, only if it has written at most ``MAX_LOST`` checkpoints. A
killed party can lose that many checkpoints (``vfl_party.base.checkpoint`` explains why). So a party
that has lost more checkpoints, by accident or on purpose, cannot make the other parties start
again.

A party that returns while the others continue (``Phase.lenient``) joins the current generation. It
resumes at its own newest checkpoint, proves to the active party that its rows are still the same,
and receives the step to catch up to. If a generation begins in such a phase, a passive party may
lack rounds that the active party has. The passive party offers the labels of these rounds too, and
reports at which labels it loses no work. The run resumes at a label at which as many parties as
possible lose no work.

A party may skip rounds that leave it unchanged (``Phase.skippable``, such as an upload). It offers
the labels after these rounds too. The run resumes at such a label only if the peers' checkpoints
contain the round's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vfl_common.errors import Code, InputError
from vfl_common.run_folder import CheckpointFiles, RunFolder
from vfl_common.stages import Planned, ahead, list_earlier_labels, make_label, parse_position
from vfl_party.base.phase import Tree

# The maximum number of checkpoints that a party can lose when it is killed.
MAX_LOST = 2


def offer_labels(
    store: CheckpointFiles, plan: Sequence[Planned]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the labels at which this party can resume, and the labels of these at which it loses
    no work; newest first.
    """
    complete = store.whole()
    # With this plan, ``ahead`` skips only rounds that leave this party unchanged.
    strict_plan = [replace(phase, lenient=False) for phase in plan]
    kept_labels = [
        label
        for checkpoint in complete
        for label in (*list_earlier_labels(checkpoint, plan), checkpoint)
    ]
    kept_labels += [
        label
        for checkpoint in complete or [make_first_label(plan)]
        for label in ahead(checkpoint, strict_plan)
    ]
    kept_labels += [""] if store.count_saved() <= MAX_LOST else []
    skipped_labels = [
        label
        for checkpoint in complete or [make_first_label(plan)]
        for label in ahead(checkpoint, plan)
    ]
    return tuple(dict.fromkeys([*kept_labels, *skipped_labels])), tuple(dict.fromkeys(kept_labels))


def find_newest(folder: RunFolder) -> str:
    """Returns the label of the newest complete checkpoint; '' if there is none."""
    return max(folder.checkpoints.whole(), default="") if folder.checkpoints is not None else ""


def make_first_label(plan: Sequence[Planned]) -> str:
    """Returns a label for the beginning of the first phase."""
    return make_label(0, plan[0].name if plan else "", 0)


def choose_own_label(folder: RunFolder, label: str, plan: Sequence[Planned]) -> str:
    """Returns the label of this party's own checkpoint to load when the run resumes at ``label``.

    Returns '' if the party has no checkpoint and may skip from the run's beginning to ``label``.
    """
    saved_labels = folder.checkpoints.labels() if folder.checkpoints is not None else []
    if label in saved_labels:
        return label
    candidates = (
        own for own in saved_labels if label in (*list_earlier_labels(own, plan), *ahead(own, plan))
    )
    return max(candidates, default="" if label in ahead(make_first_label(plan), plan) else label)


def may_return(folder: RunFolder, plan: Sequence[Planned]) -> bool:
    """Returns whether the other parties may have continued a run without this party, in a lenient
    phase.
    """
    if "data" not in folder.facts():
        return False
    own_newest, phase_start = find_newest(folder) or make_first_label(plan), 0
    min_position = parse_position(own_newest)
    max_position = max([min_position, *map(parse_position, ahead(own_newest, plan))])
    for phase in plan:
        phase_end = phase_start + phase.rounds
        if phase.lenient and phase_start <= max_position and min_position <= phase_end:
            return True
        phase_start = phase_end
    return False


def load(folder: RunFolder, label: str) -> Tree:
    """Loads the checkpoint with ``label`` and discards later checkpoints. Raises InputError if the
    checkpoint is missing.
    """
    if folder.checkpoints is None or label not in folder.checkpoints.labels():
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{folder.path}: the run resumes from checkpoint {label}, which is missing in this "
            "folder. Restore "
            "the folder, or begin a new run.",
        )
    tree = folder.checkpoints.load(label)
    folder.checkpoints.discard_after(label)
    return tree


def count_returns(folder: RunFolder) -> int:
    """Returns how often this party has returned to a run that continued without it."""
    return int(folder.facts().get("returns", 0))
