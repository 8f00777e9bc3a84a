"""What a party says when it joins, and what it begins to train with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vfl_common.config.recipe import Recipe
from vfl_common.link import OLDEST
from vfl_common.process.logs import version
from vfl_common.rpc.messages import Joining
from vfl_party.align import alignment_of
from vfl_party.assembly.models import load_encoder
from vfl_party.assembly.party import TRAINING, Training
from vfl_party.phases.course import Course
from vfl_party.predict.prediction import load_start


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
