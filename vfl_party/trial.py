"""A recipe tried before anything runs: rows, models and phases of its parties, made as before joining, and dropped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

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


@dataclass(frozen=True)
class Tried:
    """One recipe of a study. ``tested``: metrics of its test rows are wanted."""

    title: str
    recipe: Recipe
    tested: bool


def try_all(recipes: Sequence[Tried], folder: Path) -> None:
    """Makes all parties of each recipe, without training; relative paths are taken from ``folder``.

    Raises InputError, with the title, at the first recipe that a party would refuse, or of which metrics of the test
    rows are wanted and cannot be had.
    """
    tables: dict[tuple[str, bool], Table] = {}

    def once(data: DataSettings, with_label: bool) -> Table:
        """The recipes of a study have mostly the same data."""
        key = data.model_dump_json(), with_label
        if key not in tables:
            tables[key] = load(data, with_label)
        return tables[key]

    with modules_of(folder):
        for each in recipes:
            try:
                jobs = try_parties(each.recipe, folder, once)
                if each.tested:
                    _check_tested(each.recipe, jobs[each.recipe.active.name][0])
            except VflError as error:
                raise InputError(error.code, f"{each.title}: {error}") from None


@contextlib.contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Finds modules of the user's own (encoders of kind ``custom``) in ``folder`` while the block lasts."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


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
