"""A recipe tried before anything runs: rows, models and phases of its parties, made as before joining, and dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings, unaligned_of
from vfl_common.config.division import divide
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.link import Hub, Link
from vfl_party.data import Table, load_table
from vfl_party.job import PartyJob, encoder_settings, prepare
from vfl_party.methods import build_phases, evaluated

Load = Callable[[DataSettings, bool], Table]


def load(data: DataSettings, with_label: bool) -> Table:
    """Reads them."""
    return load_table(data, with_label=with_label)


def try_party(
    recipe: Recipe, name: str, data: DataSettings, encoder: EncoderSettings, load: Load = load
) -> tuple[PartyJob, int]:
    """One party with nobody to talk to, on the CPU, and how many rows it holds.

    Raises InputError where the party's program would before it joins.
    """
    table = load(data, name == recipe.active.name)
    more = unaligned_of(data)
    unaligned = load(more, False) if more is not None else None
    prepared = prepare(recipe, name, table, data, encoder, unaligned)
    job = PartyJob(
        recipe,
        name,
        prepared,
        encoder,
        torch.device("cpu"),
        "",
        _Nobody(),
        tick=lambda *_: None,
        make_phases=partial(build_phases, recipe),
    )
    return job, len(table.ids)


def try_parties(recipe: Recipe, folder: Path, load: Load = load) -> dict[str, tuple[PartyJob, int]]:
    """All parties of a recipe whose [simulate] says where data lie; paths are taken from ``folder``."""
    return {
        name: try_party(recipe, name, data, encoder_settings(recipe, name, None), load)
        for name, data in divide(recipe, folder).items()
    }


def try_all(path: Path, folder: Path) -> int:
    """Tries recipes, one JSON line each: ``{"title", "recipe", "tested"}``; how many they are.

    Raises InputError, with the title, at the first that a party would refuse, or from which metrics of the test rows
    are wanted (``tested``) where it has none.
    """
    tables: dict[tuple[str, bool], Table] = {}

    def once(data: DataSettings, with_label: bool) -> Table:
        """The recipes of a study have mostly the same data."""
        key = data.model_dump_json(), with_label
        if key not in tables:
            tables[key] = load(data, with_label)
        return tables[key]

    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        entry = json.loads(line)
        try:
            recipe = parse(Recipe, entry["recipe"], "recipe")
            jobs = try_parties(recipe, folder, once)
            if entry["tested"]:
                _check_tested(recipe, jobs[recipe.active.name][0])
        except VflError as error:
            raise InputError(error.code, f"{entry['title']}: {error}") from None
    return len(lines)


def _check_tested(recipe: Recipe, job: PartyJob) -> None:
    if "test" not in evaluated(recipe):
        text = "no phase evaluates the test rows; give finetune one of kind 'evaluate'"
        raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {text}")
    if not len(job.party.rows("test")):
        raise InputError(Code.CONFIG_INVALID, "recipe: rows.test: there are no test rows to evaluate; give a share")


class _Nobody:
    """See ``vfl_party.job.Transport``."""

    link: Link | None = None
    hub: Hub | None = None
    server: Link | None = None

    def end(self, error: VflError) -> None: ...
    def close(self, error: BaseException | None) -> None: ...
