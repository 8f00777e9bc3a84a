"""What a party says when it joins, and what it begins to train with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from vfl_common.config.recipe import Recipe
from vfl_common.link import OLDEST
from vfl_common.process.logs import version
from vfl_common.rpc.messages import Joining
from vfl_party.align import alignment_of
from vfl_party.assembly.models import load_encoder
from vfl_party.assembly.party import TRAINING, Assembled, Training
from vfl_party.phases.course import Course
from vfl_party.policy.meeting import ProposedRun, RunGuard
from vfl_party.policy.words import WordsGuard
from vfl_party.predict.prediction import load_start
from vfl_party.runtime import versions


def training(recipe: Recipe, name: str, out: Path) -> Training:
    """Prepares training from the beginning, or with the encoder of an earlier run in ``out``.
    Raises InputError.
    """
    start = load_start(recipe, name, out)
    if start is None or recipe.start is None:
        return TRAINING
    return Training(
        partial(load_encoder, tree=start.state, run_id=start.run_id, tower=recipe.start.tower)
    )


def joining_of(course: Course, role: str, plugins: Mapping[str, str]) -> Joining:
    """Returns what the server compares when a party joins; ``plugins``: those that others have
    too.
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
        oldest=max(OLDEST, course.oldest_protocol, alignment_of(recipe).protocol),
        version=version(),
    )


def check_before(guards: Sequence[RunGuard], tried: Assembled) -> ProposedRun:
    """Has each guard check a run before the party joins, and returns the run; ``tried``: the party
    as it would be.

    Raises InputError (REFUSED).
    """
    opened = tried.opened
    needed = (
        versions.get_shared_versions(opened) | versions.modelling(opened) | versions.reading(opened)
    )
    rows, epochs = len(tried.prepared.table), _epochs_of(tried)
    asked = ProposedRun(opened, tried.party, rows, epochs, [*needed])
    for guard in guards:
        guard.before(asked)
    return asked


def check_epochs(guards: Sequence[RunGuard], aligned: Assembled) -> None:
    """Has the policy check the epochs again: with ``steps``, they follow from the number of aligned
    rows. ``aligned``: the party that would train. Raises InputError (REFUSED).
    """
    for guard in guards:
        if isinstance(guard, WordsGuard):
            guard.check_epochs(_epochs_of(aligned))


def _epochs_of(party: Assembled) -> dict[str, int]:
    """Returns {phase: passes over its training rows}; in a prediction, its rounds."""
    rounds = {phase.name: phase.rounds for phase in party.phases}
    if party.opened.work.job != "train":
        return rounds
    settings = {phase.name: phase.settings for phase in party.opened.course.phases}
    return {
        phase.name: phase.epochs or getattr(settings[phase.name], "epochs", None) or phase.rounds
        for phase in party.phases
    }
