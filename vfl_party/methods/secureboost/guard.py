"""Enforces limits on the active party, at a passive party: a minimum number of rows on each side of
a split, and only one answer to each question.

Both limits follow from the recipe, so an honest run never reaches them. A party file may require
stricter recipes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from pathlib import Path

import numpy as np

from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.methods.secureboost.forest import SETTLED, Bools, Nodes
from vfl_party.methods.secureboost.growing import count_parts
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.phases.context import Party

# The file, in the party's run folder, with digests of the answered questions.
FILE = "answered-splits"
LOST_FOLDER = (
    "If the party's run folder was lost, begin a new run with --fresh at the server and every "
    "party."
)
# The maximum h of a row; see ``objective.derivatives``.
_MAX_H = {"binary": 0.25, "multiclass": 0.5, "regression": 1.0}
_ROUNDING = 1e-9


def min_rows(task: TaskSettings, settings: SecureBoostSettings, train: int, sides: int = 1) -> int:
    """Returns the minimum number of rows of a tree's sample on one side of an honest split.

    The sum of h on a side is at least ``min_child_weight``, and each row adds at most its maximum
    h. ``sides``: 2 for a node that is still open, which needs enough rows for two sides. ``train``:
    the number of training rows.
    """
    max_h = _compute_max_h(task, settings, train)
    return max(1, math.ceil(sides * settings.min_child_weight / max_h * (1 - _ROUNDING)))


def _compute_max_h(task: TaskSettings, settings: SecureBoostSettings, train: int) -> float:
    """Returns the maximum h of a row. With GOSS, the weight of a drawn row is included."""
    max_h = _MAX_H[task.kind]
    if settings.goss is not None:
        num_top, num_drawn = count_parts(train, settings.goss)
        max_h *= (train - num_top) / num_drawn
    return max_h


def compute_max_bits(task: TaskSettings, settings: SecureBoostSettings) -> int:
    """Returns the maximum number of bits that a passive party discloses about one row in a run: one
    for each level of each tree.

    Rows that are used for growing and evaluated afterwards pass through the trees twice.
    """
    evaluated_again = "train" in settings.splits or (
        settings.early_stopping is not None and "validation" in settings.splits
    )
    return (
        (settings.trees - settings.first_tree_own)
        * task.outputs
        * settings.depth
        * (1 + evaluated_again)
    )


def check_limits(party: Party, phase: str, settings: SecureBoostSettings) -> None:
    """Raises InputError if the recipe does not meet the limits in the party file. A simulation has
    no limits.
    """
    limits, task = party.terms.trees, party.recipe.task
    if limits is None:
        return
    where, limits_place = f"recipe: phases: {phase}", f"in the party file of {party.name}"
    if settings.encryption != "none" and settings.key_bits < limits.least_key_bits:
        raise InputError(
            Code.REFUSED,
            f"{where}: key_bits must be at least trees.least_key_bits = {limits.least_key_bits} "
            f"{limits_place} (got {settings.key_bits}). Use longer keys: short ones are for trials "
            "on one machine.",
        )
    if party.role == "active":
        return
    train = len(party.rows.get("train"))
    min_side_rows, bits = min_rows(task, settings, train), compute_max_bits(task, settings)
    if min_side_rows < limits.least_rows:
        weight = _compute_max_h(task, settings, train) * limits.least_rows
        raise InputError(
            Code.REFUSED,
            f"{where}: trees.least_rows = {limits.least_rows} {limits_place} requires more rows on "
            f"each side of a split (got {min_side_rows}). Set min_child_weight = {weight:g} or "
            "more.",
        )
    if limits.most_bits is not None and bits > limits.most_bits:
        raise InputError(
            Code.REFUSED,
            f"{where}: {party.name} may have to answer more bits about one row than "
            f"trees.most_bits = {limits.most_bits:,} {limits_place} (got {bits:,}). Lower trees or "
            "depth, or raise most_bits.",
        )


def find_wrong_children(
    before: Nodes,
    moved: Nodes,
    in_sample: Bools,
    own: dict[int, Bools],
    fewest: int,
    fewest_open: int,
) -> str:
    """Returns what is wrong with the positions of the rows at the next level, as the end of a
    sentence; '' if they are possible.

    Args:
        before, moved: The node of each row at the current and at the next level, [N].
        in_sample: Whether the tree learns from each row, [N].
        own: {node that this party has split: whether each of its rows goes left}.
        fewest: The minimum number of sampled rows in a child.
        fewest_open: The minimum number of sampled rows in a child that may be split again.
    """
    if not ((moved == SETTLED) | ((before != SETTLED) & (moved // 2 == before))).all():
        return "a row is not in a child of its node"
    for node in np.unique(before[before != SETTLED]).tolist():
        in_node = before == node
        below, sampled = moved[in_node], in_sample[in_node]
        if node in own and not ((below == SETTLED) | (below == 2 * node + ~own[node])).all():
            return "a row is not on the side to which its split sent it"
        sides = [below == child for child in (2 * node, 2 * node + 1)]
        if not any(side.any() for side in sides):
            # All rows are in leaves: the node is a leaf, or both of its children are.
            continue
        masks_and_minima = [(below == SETTLED, fewest), *((side, fewest_open) for side in sides)]
        children = [
            (int(sampled[mask].sum()), min_count)
            for mask, min_count in masks_and_minima
            if mask.any()
        ]
        if len(children) != 2:
            return "the rows of a node do not go to two children"
        for count, min_count in children:
            if count < min_count:
                return (
                    f"a node has too few rows that the tree learns from (got {count}, an honest "
                    f"one has at least {min_count})"
                )
    return ""


class AnswerLog:
    """Stores digests of the questions that a run has asked this party, so that a resumed run can
    only repeat them.

    An honest run repeats its questions exactly after an interruption. Without this log, each
    interruption would allow new questions, because the run returns to its last checkpoint.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._path: Path | None = None

    def keep(self, folder: Path) -> None:
        """Reads the digests of earlier generations from ``folder`` and writes new ones there.
        Raises InputError if the file cannot be read.
        """
        self._path = folder / FILE
        try:
            with contextlib.suppress(FileNotFoundError):
                for line in self._path.read_text().splitlines():
                    slot, _, digest = line.partition(" ")
                    # After a crash, the last line may be incomplete.
                    if len(digest) == hashlib.sha256().digest_size * 2:
                        self._digests.setdefault(slot, digest)
        except (OSError, ValueError):
            raise InputError(
                Code.FILE_INVALID, f"{self._path}: cannot be read. Restore the file."
            ) from None

    def is_repeated(self, slot: str, *question: bytes) -> bool:
        """Stores the question under ``slot``. Returns false if a different question was stored
        there before. Raises InputError if the file cannot be written.
        """
        digest = hashlib.sha256()
        for part in question:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        question_digest = digest.hexdigest()
        if slot not in self._digests and self._path is not None:
            try:
                self._path.touch(mode=0o600)
                with self._path.open("a") as file:
                    file.write(f"\n{slot} {question_digest}\n")
            except OSError as error:
                raise InputError(
                    Code.FILE_INVALID,
                    f"{self._path}: cannot be written ({error.strerror}). Free space, or correct "
                    "the permissions of its folder.",
                ) from None
        return self._digests.setdefault(slot, question_digest) == question_digest
