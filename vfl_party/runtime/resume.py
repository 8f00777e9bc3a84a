"""At which labels a party can resume a run. Functions of its checkpoints and its plan.

Positions. The rounds of all phases are numbered through: a checkpoint's label is
``<position>.<phase>.<round>`` with the position zero-padded, so that labels sort, and parties
compare labels without knowing each other's phases.

A party keeps the rounds that it did alone (``Phase.alone_from``): it offers their labels as resume
points too, without checkpoints of its own there. For example, A and B are both alone from position
2, and the run resumes at 3:

    A    has a checkpoint at 5    offers 5 4 3 2    resumes at 5
    B    has a checkpoint at 3    offers 3 2        resumes at 3, and repeats 3 and 4

A party that is alone to the end of the run is not needed if the run resumes at such a label, so it
may leave.

A party offers '', the run's beginning, only if it has written at most ``MAX_LOST`` checkpoints:
until then a party that is killed may hold none (``vfl_party.base.checkpoint`` says why). So a party
that offers nothing, by accident or on purpose, cannot have the others begin again.

A party that comes back while the others go on (``Phase.lenient``) joins the generation that is
under way. It resumes at its own newest checkpoint, shows the active party that its rows are still
the same, and is told the step to catch up to. If a generation begins in such a phase, a passive
party may lack the rounds that the active party has: it offers their labels, too, and says which of
its labels it holds. The run resumes at a label that as many as possible hold.

A party may skip rounds that leave it unchanged (``Phase.skippable``: an upload). It offers the
labels after them too; the run begins at one only if the peers' checkpoints hold the round's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vfl_common.errors import Code, InputError
from vfl_common.run_folder import CheckpointFiles, RunFolder
from vfl_common.stages import Planned, ahead, label_of, position_of, reachable
from vfl_party.base.phase import Tree

# Checkpoints that a death may cost a party.
MAX_LOST = 2


def offer_labels(
    store: CheckpointFiles, plan: Sequence[Planned]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the labels at which this party can resume, and those of them that it holds; newest
    first.
    """
    whole = store.whole()
    # Skips only what leaves this party unchanged.
    strict = [replace(phase, lenient=False) for phase in plan]
    own = [label for checkpoint in whole for label in (*reachable(checkpoint, plan), checkpoint)]
    own += [
        label for checkpoint in whole or [beginning(plan)] for label in ahead(checkpoint, strict)
    ]
    own += [""] if store.count_saved() <= MAX_LOST else []
    skips = [
        label for checkpoint in whole or [beginning(plan)] for label in ahead(checkpoint, plan)
    ]
    return tuple(dict.fromkeys([*own, *skips])), tuple(dict.fromkeys(own))


def newest(folder: RunFolder) -> str:
    """Returns the label of the newest whole checkpoint; '' if there is none."""
    return max(folder.checkpoints.whole(), default="") if folder.checkpoints is not None else ""


def beginning(plan: Sequence[Planned]) -> str:
    """Returns a label for the beginning of the first phase."""
    return label_of(0, plan[0].name if plan else "", 0)


def own_label(folder: RunFolder, label: str, plan: Sequence[Planned]) -> str:
    """Returns the label of this party's own checkpoint to load when the run resumes at ``label``.

    '' if it has none, and may skip to ``label`` from the run's beginning.
    """
    held = folder.checkpoints.labels() if folder.checkpoints is not None else []
    if label in held:
        return label
    near = (own for own in held if label in (*reachable(own, plan), *ahead(own, plan)))
    return max(near, default="" if label in ahead(beginning(plan), plan) else label)


def may_return(folder: RunFolder, plan: Sequence[Planned]) -> bool:
    """Whether the others may be in the middle of a run that this party has been in: in a phase that
    is lenient.
    """
    if "data" not in folder.facts():
        return False
    own, begin = newest(folder) or beginning(plan), 0
    first = position_of(own)
    last = max([first, *map(position_of, ahead(own, plan))])
    for phase in plan:
        end = begin + phase.rounds
        if phase.lenient and begin <= last and first <= end:
            return True
        begin = end
    return False


def load(folder: RunFolder, label: str) -> Tree:
    """Loads a checkpoint, and discards those after it. Raises InputError if it is not here."""
    if folder.checkpoints is None or label not in folder.checkpoints.labels():
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{folder.path}: the run resumes from checkpoint {label}, which is not here. Restore "
            "the folder, or begin a new run.",
        )
    tree = folder.checkpoints.load(label)
    folder.checkpoints.discard_after(label)
    return tree


def returns(folder: RunFolder) -> int:
    """How often this party has come back to others that had gone on."""
    return int(folder.facts().get("returns", 0))
