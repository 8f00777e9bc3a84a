"""Checks a recipe before it runs, by assembling its parties without connecting or training them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe, divide
from vfl_common.errors import Code, InputError, VflError
from vfl_party.align import align_tables
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
    """Assembles one party on the CPU, in the state before it joins.

    Raises the same InputErrors as the party's program.
    """
    opened = open_party(recipe, name, data, encoder, load)
    return assemble(opened, expect_rows(opened), policy=policy)


def try_parties(recipe: Recipe, folder: Path, load: Load = load) -> dict[str, Assembled]:
    """Assembles all parties of a recipe that has a table [simulate].

    ``folder``: The base of relative paths to the data. Raises InputError if a party refuses the
    recipe.
    """
    opened = {
        name: open_party(recipe, name, data, encoder_settings(recipe, name, None), load)
        for name, data in divide(recipe, folder).items()
    }
    if recipe.rows.partial:
        aligned_rows = align_tables(recipe, {name: party.table for name, party in opened.items()})
        return {
            name: assemble(party, aligned_rows[name], policy=load_trial_policy(recipe, name))
            for name, party in opened.items()
        }
    # The other parties receive the active party's division into splits.
    shared = expect_rows(opened[recipe.active.name])
    rows = {name: expect_rows(party) for name, party in opened.items()}
    # In a trial the numbers of rows at all parties are known.
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
    """A recipe of a study. ``tested``: Whether the study needs metrics of the test rows."""

    title: str
    recipe: Recipe
    tested: bool


def try_all(recipes: Sequence[Tried], folder: Path) -> None:
    """Assembles all parties of each recipe, without training.

    ``folder``: The base of relative paths to the data. Raises InputError, with the recipe's title,
    at the first recipe that a party refuses, or that evaluates no test rows although the study
    needs their metrics.
    """
    tables: dict[tuple[str, bool], Table] = {}

    def load_once(data: DataSettings, with_label: bool) -> Table:
        """Loads each table only once, because the recipes of a study usually use the same data."""
        key = data.model_dump_json(), with_label
        if key not in tables:
            tables[key] = load(data, with_label)
        return tables[key]

    with modules_of(folder):
        for trial in recipes:
            try:
                parties = try_parties(trial.recipe, folder, load_once)
                if trial.tested:
                    _check_tested(parties[trial.recipe.active.name])
            except VflError as error:
                raise InputError(error.code, f"{trial.title}: {error}") from None


@contextlib.contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Makes the user's modules in ``folder`` importable inside the ``with`` block.

    Modules that were imported in the block are removed afterwards, because another recipe may have
    different modules of the same names.
    """
    sys.path.insert(0, str(folder))
    earlier_modules = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in sys.modules.keys() - earlier_modules:
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
    # ``holdings`` is empty unless the parties have different rows.
    held = party.party.rows.data.holdings.values()
    if not (any(rows["test"] for rows in held) if held else len(party.party.rows.get("test"))):
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: rows.test: no test rows to evaluate. Set a share of the rows.",
        )
