"""Tries settings for a slow link, codecs and steps in flight, and says what each would cost in exactness."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vfl.forecasting.network import Network
from vfl.forecasting.words import duration, rate
from vfl.report.table import new_table, size
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError

if TYPE_CHECKING:
    from vfl_party.context import Party

BITS = (32, 16, 8, 4)
FLIGHTS = (1, 2, 4, 8, 16)
_NEAR = 1.1  # a setting that takes so much longer than the soonest is as good, if it costs less
_OF_BITS = {
    32: "",
    16: "values keep 11 bits",
    8: "values are rounded to 256 levels a row",
    4: "values are rounded to 16 levels a row",
}


@dataclass(frozen=True)
class Setting:
    """Settings that were tried. ``bits``: of a value on the wire; ``seconds``, ``message_bytes``: of the whole run."""

    bits: int
    in_flight: int
    seconds: float
    message_bytes: int
    cost: str


@dataclass(frozen=True)
class Suggestions:
    """All that were tried; ``best``: the one to paste. ``refused``: why some could not be, each reason once."""

    network: Network
    phases: tuple[str, ...]
    tried: tuple[Setting, ...]
    best: Setting
    refused: tuple[str, ...] = ()

    @property
    def toml(self) -> str:
        """What to paste into the recipe; empty if it is best as it is."""
        lines = []
        if self.best.in_flight > 1:
            for phase in self.phases:
                lines.append(f"# in the phase {phase}:\nin_flight = {self.best.in_flight}\n")
        for table in wire(self.phases, self.best.bits):
            lines.append("[[wire]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()))
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Returns all of it, for a program to read."""
        tried = [asdict(each) for each in self.tried]
        return {"tried": tried, "best": asdict(self.best), "toml": self.toml, "refused": list(self.refused)}

    def render(self) -> Group:
        """Returns the table, and what to paste."""
        there = f"{rate(self.network.bandwidth)}, {self.network.latency_s * 1000:g} ms one way"
        table = new_table(f"Settings of {', '.join(self.phases)} tried for {there}")
        for heading in ("bits a value", "in flight", "time", "message bytes"):
            table.add_column(heading, justify="right")
        table.add_column("what it costs in exactness", overflow="fold")
        for each in self.tried:
            style = "bold" if each == self.best else ""
            cells = (str(each.bits), str(each.in_flight), duration(each.seconds), size(each.message_bytes))
            table.add_row(*cells, each.cost or "nothing", style=style)
        parts: list[Text | Table] = [table, Text()]
        parts += [Text(f"Not tried: {reason}") for reason in self.refused]
        if not self.toml:
            return Group(*parts, Text("The recipe is best as it is: nothing else is sooner by a tenth.\n"))
        text = "To paste, the mildest setting within a tenth of the soonest; try on validation rows what it costs:"
        return Group(*parts, Text(f"{text}\n"), Text(self.toml))


def suggestions(party: Party, rows: int, network: Network, ended: Mapping[str, int] | None = None) -> Suggestions:
    """Tries every combination for the phases that can have steps in flight, or for all if none can.

    ``party``, ``rows``, ``ended``: as for ``forecast_of``. Raises InputError if nothing can be tried.
    """
    from vfl_party.forecast.count import forecast_of

    phases, flights = _phases(party.recipe)
    tried: list[Setting] = []
    refused: dict[str, None] = {}
    for bits in BITS:
        for in_flight in flights:
            try:
                changed = with_settings(party.recipe, phases, bits, in_flight)
                found = forecast_of(replace(party, recipe=changed, exchanges={}), rows, ended)
            except InputError as error:
                if (bits, in_flight) == (BITS[0], flights[0]):
                    raise
                refused[str(error)] = None
                continue
            seconds = sum(network.seconds(phase.name, phase.runs) for phase in found.phases)
            whole = sum(link.message_bytes for link in found.links)
            tried.append(Setting(bits, in_flight, seconds, whole, cost(bits, in_flight)))
    soonest_s = min(each.seconds for each in tried)
    near = [each for each in tried if each.seconds <= _NEAR * soonest_s]
    best = min(near, key=lambda each: (each.in_flight, -each.bits))
    return Suggestions(network, phases, tuple(tried), best, tuple(refused))


def with_settings(recipe: Recipe, phases: tuple[str, ...], bits: int, in_flight: int) -> Recipe:
    """Returns the recipe with other settings of wire and pipe for ``phases``. Raises InputError if it refuses them."""
    tables = recipe.model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        phase |= phase.pop("settings", {})
        if phase.get("name", phase["kind"]) in phases:
            phase.pop("codec", None)
            if in_flight > 1 or "in_flight" in phase:
                phase["in_flight"] = in_flight
    flat = [each | each.pop("settings", {}) for each in tables.get("wire", ())]
    kept = [each for each in flat if each.get("phase") not in (None, *phases)]
    if tables.pop("wire", None) is not None or bits != BITS[0]:
        tables["wire"] = [*kept, *wire(phases, bits)]
    return parse(Recipe, tables, "recipe")


def wire(phases: tuple[str, ...], bits: int) -> list[dict[str, Any]]:
    """Returns the recipe's [[wire]] tables for values of so many bits."""
    if bits == BITS[0]:
        return []
    codec: dict[str, Any] = {"codec": "float16"} if bits == 16 else {"codec": "bits", "bits": bits}
    return [{"phase": phase, **codec} for phase in phases]


def cost(bits: int, in_flight: int) -> str:
    """Returns one sentence on what settings cost in exactness; empty if nothing."""
    late = in_flight - 1
    stale = f"gradients are {late} update{'s' if late > 1 else ''} old" if late else ""
    return "; ".join(filter(None, (stale, _OF_BITS[bits])))


def _phases(recipe: Recipe) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the phases to change, and how many steps in flight to try."""
    from vfl_party.methods import load_method

    methods = {phase.name: load_method(phase.kind) for phase in recipe.phases}
    piped = tuple(name for name, method in methods.items() if "in_flight" in method.settings.model_fields)
    return (piped, FLIGHTS) if piped else (tuple(methods), FLIGHTS[:1])
