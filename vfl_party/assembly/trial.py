"""Tries a recipe before anything runs: makes its parties' rows, models and phases as before
joining; drops them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vfl_common.config.data import DataSettings
from vfl_common.config.division import divide
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_party.align import of_tables
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import Assembled, Load, assemble, expect_rows, load, open_party
from vfl_party.data import Table
from vfl_party.outbound.policies import Policy, load_trial_policy


def try_party(
    recipe: Recipe,
    name: str,
    data: DataSettings,
    encoder: EncoderSettings,
    load: Load = load,
    *,
    policy: Policy | None = None,
) -> Assembled:
    """Makes one party as it is before it joins, on the CPU. Raises InputError as the party's
    program does.
    """
    opened = open_party(recipe, name, data, encoder, load)
    return assemble(opened, expect_rows(opened), policy=policy)


def try_parties(recipe: Recipe, folder: Path, load: Load = load) -> dict[str, Assembled]:
    """Makes all parties of a recipe whose [simulate] says where data lie; paths are relative to
    ``folder``.
    """
    opened = {
        name: open_party(recipe, name, data, encoder_settings(recipe, name, None), load)
        for name, data in divide(recipe, folder).items()
    }
    if recipe.rows.partial:
        partly = of_tables(recipe, {name: party.table for name, party in opened.items()})
        return {
            name: assemble(party, partly[name], policy=load_trial_policy(recipe, name))
            for name, party in opened.items()
        }
    # The active party's division, which the others receive.
    shared = expect_rows(opened[recipe.active.name])
    rows = {name: expect_rows(party) for name, party in opened.items()}
    # Here, all parties' rows are known.
    if recipe.rows.align == "none":
        held = {place.name: rows[place.name].holdings[place.name] for place in recipe.passives}
        return {
            name: assemble(
                party, replace(rows[name], holdings=held), policy=load_trial_policy(recipe, name)
            )
            for name, party in opened.items()
        }
    return {
        name: assemble(
            party,
            shared if shared.ids == rows[name].ids else rows[name],
            policy=load_trial_policy(recipe, name),
        )
        for name, party in opened.items()
    }


@dataclass(frozen=True)
class Tried:
    """One recipe of a study. ``tested``: the study wants metrics of its test rows."""

    title: str
    recipe: Recipe
    tested: bool


def try_all(recipes: Sequence[Tried], folder: Path) -> None:
    """Makes all parties of each recipe, without training; paths are relative to ``folder``.

    Raises InputError, with the title, at the first recipe that a party refuses, or that cannot give
    the metrics of the test rows although the study wants them.
    """
    tables: dict[tuple[str, bool], Table] = {}

    def once(data: DataSettings, with_label: bool) -> Table:
        """Loads a table once: the recipes of a study mostly have the same data."""
        key = data.model_dump_json(), with_label
        if key not in tables:
            tables[key] = load(data, with_label)
        return tables[key]

    with modules_of(folder):
        for trial in recipes:
            try:
                parties = try_parties(trial.recipe, folder, once)
                if trial.tested:
                    _check_tested(parties[trial.recipe.active.name])
            except VflError as error:
                raise InputError(error.code, f"{trial.title}: {error}") from None


@contextlib.contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Finds the user's own modules (encoders of kind ``custom``) in ``folder`` while the block
    lasts.

    Those that are imported meanwhile are forgotten afterwards: another recipe may have others of
    the same names.
    """
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == folder.resolve():
                del sys.modules[name]


def _check_tested(party: Assembled) -> None:
    if "test" not in party.party.course.evaluated:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: no phase evaluates the test rows. Set finetune of one phase of kind "
            "'evaluate'.",
        )
    # If the parties hold different rows.
    held = party.party.data.holdings.values()
    if not (any(rows["test"] for rows in held) if held else len(party.party.rows("test"))):
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: rows.test: no test rows to evaluate. Set a share of the rows.",
        )
