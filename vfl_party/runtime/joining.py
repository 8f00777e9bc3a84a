"""Makes a party's Join message, its initial model for training, and the checks before it joins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from vfl_common.bundle import OLDEST
from vfl_common.config.recipe import Recipe
from vfl_common.process.logs import version
from vfl_common.rpc.messages import Joining
from vfl_party.align import make_alignment
from vfl_party.assembly.models import load_encoder
from vfl_party.assembly.party import TRAINING, Assembled, Training
from vfl_party.phases.course import Course
from vfl_party.policy.guards import WordsGuard
from vfl_party.policy.meeting import ProposedRun, RunGuard
from vfl_party.predict.run import load_start
from vfl_party.runtime import versions


def prepare_training(recipe: Recipe, name: str, out: Path) -> Training:
    """Returns how training starts: from initial weights, or with the encoder of an earlier run in
    ``out``. Raises InputError.
    """
    start = load_start(recipe, name, out)
    if start is None or recipe.start is None:
        return TRAINING
    return Training(
        partial(load_encoder, tree=start.state, run_id=start.run_id, tower=recipe.start.tower)
    )


def joining_of(course: Course, role: str, plugins: Mapping[str, str]) -> Joining:
    """Returns the facts that the server compares when a party joins. ``plugins``: {name: version}
    of the plug-ins that other parties need too.
    """
    spelling, recipe = course.filled, course.recipe
    return Joining(
        role=role,
        recipe_json=recipe.canonical_json(),
        job="train",
        pid=0,
        device="",
        plugins=plugins,
        filled_json=json.dumps(spelling.filled, sort_keys=True, separators=(",", ":")),
        written=tuple(sorted(spelling.written)),
        oldest=max(OLDEST, course.oldest_protocol, make_alignment(recipe).protocol),
        version=version(),
    )


def check_before(guards: Sequence[RunGuard], assembled: Assembled) -> ProposedRun:
    """Calls each guard to check a run before the party joins, and returns the checked run.
    ``assembled``: The party, assembled with the rows that it expects.

    Raises InputError (REFUSED).
    """
    opened = assembled.opened
    plugins = (
        versions.get_shared_versions(opened)
        | versions.get_model_versions(opened)
        | versions.get_reader_versions(opened)
    )
    rows, epochs = len(assembled.prepared.table), _count_epochs(assembled)
    proposed = ProposedRun(opened, assembled.party, rows, epochs, [*plugins])
    for guard in guards:
        guard.before(proposed)
    return proposed


def check_epochs(guards: Sequence[RunGuard], assembled: Assembled) -> None:
    """Calls the policy's guard to check the epochs again, because with ``steps`` they depend on the
    number of aligned rows. ``assembled``: The party, assembled from the aligned rows. Raises
    InputError (REFUSED).
    """
    for guard in guards:
        if isinstance(guard, WordsGuard):
            guard.check_epochs(_count_epochs(assembled))


def _count_epochs(party: Assembled) -> dict[str, int]:
    """Returns {phase: number of passes over its training rows}; in a prediction, {phase: number of
    rounds}.
    """
    rounds = {phase.name: phase.rounds for phase in party.phases}
    if party.opened.work.job != "train":
        return rounds
    settings = {phase.name: phase.settings for phase in party.opened.course.phases}
    return {
        phase.name: phase.epochs or getattr(settings[phase.name], "epochs", None) or phase.rounds
        for phase in party.phases
    }
