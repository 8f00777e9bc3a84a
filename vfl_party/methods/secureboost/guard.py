"""Limits that a passive party enforces against the active party: a minimum of rows on each side of
a split, and one answer to each question.

Both follow from the recipe, so that an honest run never reaches them. A party file may require
stricter recipes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from pathlib import Path

import numpy as np

from vfl_common.config.models import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.positions import SETTLED, Bools, Nodes
from vfl_party.methods.secureboost.tree.sampling import count_parts
from vfl_party.phases.context import Party

# A file in the party's folder of the run.
FILE = "answered-splits"
LOST_FOLDER = (
    "If its folder of the run was lost, begin a new run with --fresh at the server and every party."
)
# The largest h of a row; see ``objective.derivatives``.
_MAX_H = {"binary": 0.25, "multiclass": 0.5, "regression": 1.0}
_ROUNDING = 1e-9


def min_rows(task: TaskSettings, settings: SecureBoostSettings, train: int, sides: int = 1) -> int:
    """Returns the minimum number of rows of a tree's sample on one side of an honest split.

    A side weighs at least ``min_child_weight``, and a row at most its largest possible h.
    ``sides``: 2 for a node that is still open, which needs rows for two sides. ``train``: the
    number of training rows.
    """
    max_h = _max_h(task, settings, train)
    return max(1, math.ceil(sides * settings.min_child_weight / max_h * (1 - _ROUNDING)))


def _max_h(task: TaskSettings, settings: SecureBoostSettings, train: int) -> float:
    """Returns the largest possible h of a row; a row that GOSS draws counts several times."""
    max_h = _MAX_H[task.kind]
    if settings.goss is not None:
        top, rest = count_parts(train, settings.goss)
        max_h *= (train - top) / rest
    return max_h


def max_bits(task: TaskSettings, settings: SecureBoostSettings) -> int:
    """Returns the maximum number of bits that a passive party answers about one row in a run: one
    for each level of each tree.

    Rows that take part in the growth and are scored afterwards walk through the trees twice.
    """
    twice = "train" in settings.splits or (
        settings.early_stopping is not None and "validation" in settings.splits
    )
    return (settings.trees - settings.first_tree_own) * task.outputs * settings.depth * (1 + twice)


def check_asked(party: Party, phase: str, settings: SecureBoostSettings) -> None:
    """Raises InputError if the recipe does not meet the limits in the party's file; a simulation
    has no limits.
    """
    asked, task = party.trees, party.recipe.task
    if asked is None:
        return
    where, own = f"recipe: phases: {phase}", f"in the party file of {party.name}"
    if settings.encryption != "none" and settings.key_bits < asked.least_key_bits:
        raise InputError(
            Code.REFUSED,
            f"{where}: key_bits must be at least trees.least_key_bits = {asked.least_key_bits} "
            f"{own} (got {settings.key_bits}). Use longer keys: short ones are for trials on one "
            "machine.",
        )
    if party.role == "active":
        return
    train = len(party.rows("train"))
    fewest, bits = min_rows(task, settings, train), max_bits(task, settings)
    if fewest < asked.least_rows:
        weight = _max_h(task, settings, train) * asked.least_rows
        raise InputError(
            Code.REFUSED,
            f"{where}: trees.least_rows = {asked.least_rows} {own} requires more rows on each "
            f"side of a split (got {fewest}). Set min_child_weight = {weight:g} or more.",
        )
    if asked.most_bits is not None and bits > asked.most_bits:
        raise InputError(
            Code.REFUSED,
            f"{where}: {party.name} may have to answer more bits about one row than "
            f"trees.most_bits = {asked.most_bits:,} {own} (got {bits:,}). Lower trees or depth, "
            "or raise most_bits.",
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
        before, moved: the node of each row at both levels, [N].
        in_sample: whether the tree learns from each row, [N].
        own: {node that this party has split: whether each of its rows goes left}.
        fewest: the minimum number of rows of the sample in a child.
        fewest_open: the same for a child that may be split again.
    """
    if not ((moved == SETTLED) | ((before != SETTLED) & (moved // 2 == before))).all():
        return "a row is not in a child of its node"
    for node in np.unique(before[before != SETTLED]).tolist():
        here = before == node
        below, sampled = moved[here], in_sample[here]
        if node in own and not ((below == SETTLED) | (below == 2 * node + ~own[node])).all():
            return "a row is not where its split sent it"
        sides = [below == child for child in (2 * node, 2 * node + 1)]
        if not any(side.any() for side in sides):
            # The node is a leaf, or both of its children are.
            continue
        parts_ = [(below == SETTLED, fewest), *((side, fewest_open) for side in sides)]
        children = [
            (int(sampled[part].sum()), min_count) for part, min_count in parts_ if part.any()
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
    """The questions that a run has already asked this party, so that a resumed run can only repeat
    them.

    An honest run repeats itself exactly after an interruption. Without this log, each interruption
    allows new questions, because the run returns to its last checkpoint.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._path: Path | None = None

    def keep(self, folder: Path) -> None:
        """Reads the answers of earlier generations from ``folder``, and writes new ones to it.
        Raises InputError.
        """
        self._path = folder / FILE
        try:
            with contextlib.suppress(FileNotFoundError):
                for line in self._path.read_text().splitlines():
                    slot, _, digest = line.partition(" ")
                    # The last line may be incomplete.
                    if len(digest) == hashlib.sha256().digest_size * 2:
                        self._known.setdefault(slot, digest)
        except (OSError, ValueError):
            raise InputError(
                Code.FILE_INVALID, f"{self._path}: cannot be read. Restore it."
            ) from None

    def same(self, slot: str, *question: bytes) -> bool:
        """Stores the question at ``slot``; returns false if another one was stored there. Raises
        InputError.
        """
        digest = hashlib.sha256()
        for part in question:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        question_digest = digest.hexdigest()
        if slot not in self._known and self._path is not None:
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
        return self._known.setdefault(slot, question_digest) == question_digest
