"""Suggests codecs and steps in flight for a slow link, with their cost in exactness."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vfl.forecasting.network import Network, format_duration, format_rate
from vfl.summary.table import format_size, new_table
from vfl_common.bundle import DType
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError

if TYPE_CHECKING:
    from vfl_party.forecast.result import CountedForecast, PhaseForecast
    from vfl_party.phases.context import Party

BITS = (32, 16, 8, 4, 2)
FLIGHTS = (1, 2, 4, 8, 16)
# A training round must have at least this many times as many steps as are in flight, because the
# pipeline is filled and emptied once in each round.
_ROUND_STEPS = 4
# Above this share of latency in a step's time, a larger batch is suggested.
_MOSTLY = 0.5
# Up to this ratio to the time of the fastest setting, a setting with a lower cost is preferred.
_NEAR = 1.1
# The minimum number of bits for weights that the server averages.
_MIN_AVERAGED = 8
_OF_BITS = {
    32: "",
    16: "values keep 11 bits",
    8: "values are rounded to 256 levels a row",
    4: "values are rounded to 16 levels a row",
    2: "values are rounded to 4 levels a row",
}


@dataclass(frozen=True)
class Scope:
    """The phases whose settings are tried.

    ``piped``: the phases that can have several steps in flight. ``coded``: the exchanges that can
    have a codec: (phase, None) for all messages between its parties, or (phase, exchange) for an
    average of the server.
    """

    piped: tuple[str, ...]
    coded: tuple[tuple[str, str | None], ...]

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases with settings to try."""
        return tuple(dict.fromkeys([*self.piped, *(phase for phase, _ in self.coded)]))

    def wire(self, bits: int) -> list[dict[str, Any]]:
        """Returns the recipe's [[wire]] tables for values of ``bits`` bits. Averages have at least
        eight bits.
        """
        if bits == BITS[0]:
            return []
        tables = []
        for phase, average in self.coded:
            exchange = {} if average is None else {"exchange": average}
            codec = _make_codec(bits if average is None else max(bits, _MIN_AVERAGED))
            tables.append({"phase": phase} | exchange | codec)
        return tables


@dataclass(frozen=True)
class Setting:
    """One combination of settings that was tried. ``bits``: the number of bits of a value on the
    wire. ``seconds``, ``message_bytes``: the time and bytes of the whole run. ``cost``: a text
    about the cost in exactness.
    """

    bits: int
    in_flight: int
    seconds: float
    message_bytes: int
    cost: str


@dataclass(frozen=True)
class Suggestions:
    """All tried settings. ``best``: the suggested setting. ``refused``: the reasons why other
    settings could not be tried.

    ``toml``: the text to paste into the recipe; empty if the recipe is best unchanged. ``own``:
    (seconds, message bytes) of the unchanged recipe. ``waits``: the share of latency in the time of
    the unchanged recipe.
    """

    network: Network
    phases: tuple[str, ...]
    tried: tuple[Setting, ...]
    best: Setting
    own: tuple[float, int]
    toml: str
    refused: tuple[str, ...] = ()
    waits: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns the suggestions as JSON values."""
        seconds, message_bytes = self.own
        as_it_is = {"seconds": seconds, "message_bytes": message_bytes, "waits": self.waits}
        tried = [asdict(setting) for setting in self.tried]
        tables = {"as_it_is": as_it_is, "tried": tried, "best": asdict(self.best)}
        return tables | {"toml": self.toml, "refused": list(self.refused)}

    def render(self) -> Group:
        """Returns the table, and the text to paste."""
        there = (
            f"{format_rate(self.network.bandwidth)}, {self.network.latency_s * 1000:g} ms one way"
        )
        table = new_table(f"Settings of {', '.join(self.phases)} tried for {there}")
        for heading in ("bits a value", "in flight", "time", "message bytes"):
            table.add_column(heading, justify="right")
        table.add_column("cost in exactness", overflow="fold")
        seconds, message_bytes = self.own
        table.add_row(
            "as it", "is", format_duration(seconds), format_size(message_bytes), "nothing"
        )
        for setting in self.tried:
            table.add_row(
                str(setting.bits),
                str(setting.in_flight),
                format_duration(setting.seconds),
                format_size(setting.message_bytes),
                setting.cost or "nothing",
                style="bold" if setting == self.best else "",
            )
        parts: list[Text | Table] = [table, Text()]
        parts += [Text(f"Not tried: {reason}") for reason in self.refused]
        if self.waits >= _MOSTLY:
            parts.append(
                Text(
                    f"{100 * self.waits:.0f} % of the recipe's time is latency. A larger "
                    "batch_size has fewer steps, and no old gradients; but it changes "
                    "training: compare validation rows.\n"
                )
            )
        if not self.toml:
            return Group(
                *parts, Text("The recipe is best unchanged: no setting is faster by a tenth.\n")
            )
        return Group(
            *parts,
            Text(
                "To paste, the mildest setting within a tenth of the fastest; test its cost on "
                "validation rows:\n"
            ),
            Text(self.toml),
        )


def make_suggestions(
    party: Party, rows: int, network: Network, ended: Mapping[str, int] | None = None
) -> Suggestions:
    """Tries every combination of codecs and steps in flight that the phases support.

    ``party``, ``rows``, ``ended``: as in ``forecast_of``. Raises InputError if no phase supports
    codecs or steps in flight.
    """
    from vfl_party.forecast.count import forecast_of
    from vfl_party.phases.context import with_course
    from vfl_party.phases.course import Course

    scope, recipe = _find_scope(party), party.recipe
    unchanged = forecast_of(party, rows, ended)
    if not scope.phases:
        raise InputError(
            Code.CONFIG_INVALID,
            "--suggest: no phase of this recipe can have codecs or steps in flight. Forecast "
            "without --suggest.",
        )
    steps, flights = _min_steps(unchanged, scope.piped), FLIGHTS if scope.piped else FLIGHTS[:1]
    allowed_flights = tuple(
        flight for flight in flights if flight == 1 or flight * _ROUND_STEPS <= steps
    )
    refused: dict[str, None] = {}
    if len(allowed_flights) < len(flights):
        refused[
            f"more than {allowed_flights[-1]} in flight: a round has {steps} steps, and ends with "
            "an empty pipe"
        ] = None
    tried: list[Setting] = []
    for bits in BITS if scope.coded else BITS[:1]:
        counted = None
        for in_flight in allowed_flights:
            try:
                changed = change_settings(recipe, scope, bits, in_flight)
                counted = counted or forecast_of(with_course(party, Course(changed)), rows, ended)
            except InputError as error:
                refused[str(error)] = None
                continue
            seconds = sum(
                _compute_seconds(network, phase, scope, in_flight) for phase in counted.phases
            )
            tried.append(
                Setting(
                    bits, in_flight, seconds, _count_bytes(counted), describe_cost(bits, in_flight)
                )
            )
    if not tried:
        raise InputError(Code.CONFIG_INVALID, "--suggest: " + next(iter(refused)))
    fastest_s = min(setting.seconds for setting in tried)
    near_fastest = [setting for setting in tried if setting.seconds <= _NEAR * fastest_s]
    best = min(near_fastest, key=lambda setting: (setting.in_flight, -setting.bits))
    own = (
        sum(network.seconds(phase.name, phase.runs) for phase in unchanged.phases),
        _count_bytes(unchanged),
    )
    toml, waits = _make_toml(recipe, scope, best), _compute_latency_share(unchanged, network)
    return Suggestions(network, scope.phases, tuple(tried), best, own, toml, tuple(refused), waits)


def change_settings(recipe: Recipe, scope: Scope, bits: int, in_flight: int) -> Recipe:
    """Returns the recipe with another number of bits and of steps in flight. Raises InputError if
    the settings are invalid.
    """
    tables = recipe.model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        phase |= phase.pop("settings", {})
        phase.pop("codec", None)
        if phase.get("name", phase["kind"]) in scope.piped and (
            in_flight > 1 or "in_flight" in phase
        ):
            phase["in_flight"] = in_flight
    if tables.pop("wire", None) is not None or bits != BITS[0]:
        tables["wire"] = scope.wire(bits)
    return parse(Recipe, tables, "recipe")


def describe_cost(bits: int, in_flight: int) -> str:
    """Returns a text about the cost of settings in exactness; empty if they have no cost."""
    late = in_flight - 1
    stale = f"gradients are {late} update{'s' if late > 1 else ''} old" if late else ""
    return "; ".join(filter(None, (stale, _OF_BITS[bits])))


def _find_scope(party: Party) -> Scope:
    """Finds the phases whose settings can be tried. Phases with unknown exchanges are left out."""
    piped, coded = list[str](), dict[tuple[str, str | None], None]()
    for phase in party.course.phases:
        traffic = phase.method.traffic(party, phase.name, phase.settings)
        if traffic is None:
            continue
        if "in_flight" in phase.method.settings.model_fields:
            piped.append(phase.name)
        for occurrence in traffic.occurrences:
            exchange = occurrence.exchange
            what = (phase.name, exchange.name if exchange.asks == "server" else None)
            if what in coded:
                continue
            specs = [
                sent.spec(**dict(occurrence.sizes)).tensors.values()
                for sent in (exchange.up, exchange.down)
            ]
            if any(tensor.dtype is DType.FLOAT32 for tensors in specs for tensor in tensors):
                coded[what] = None
    return Scope(tuple(piped), tuple(coded))


def _make_codec(bits: int) -> dict[str, Any]:
    return {"codec": "float16"} if bits == 16 else {"codec": "bits", "bits": bits}


def _compute_seconds(network: Network, phase: PhaseForecast, scope: Scope, in_flight: int) -> float:
    """Returns the time of a phase with ``in_flight`` batches in flight."""
    runs = phase.runs
    if phase.name in scope.piped:
        runs = tuple(
            run.model_copy(update={"in_flight": in_flight * run.parts}) if run.trains else run
            for run in phase.runs
        )
    return network.seconds(phase.name, runs)


def _count_bytes(counted: CountedForecast) -> int:
    return sum(link.message_bytes for link in counted.links)


def _make_toml(recipe: Recipe, scope: Scope, best: Setting) -> str:
    """Returns the text to paste into a recipe for the best setting; empty if the recipe already has
    this setting.
    """
    if change_settings(recipe, scope, best.bits, best.in_flight) == recipe:
        return ""
    lines = []
    for phase in recipe.phases:
        current = phase.settings.get("in_flight", 1)
        if phase.name in scope.piped and current != best.in_flight:
            instead = f", instead of in_flight = {current}" if current != 1 else ""
            predict = (
                "# predict_weights = true    # sends nothing more, and helps with Adam or "
                "momentum\n"
            )
            more = predict if best.in_flight > 1 and "predict_weights" not in phase.settings else ""
            lines.append(
                f"# into the table [[phases]] of {phase.name}{instead}:\nin_flight = "
                f"{best.in_flight}\n{more}"
            )
    tables, has = (
        scope.wire(best.bits),
        recipe.wire or any(phase.codec != "identity" for phase in recipe.phases),
    )
    existing = "all tables [[wire]], and all keys codec of [[phases]]"
    if tables:
        lines.append(f"# at the end of the file{f', instead of {existing}' if has else ''}:")
    elif has:
        lines.append(f"# remove {existing}\n")
    for table in tables:
        lines.append(
            "[[wire]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        )
    return "\n".join(lines)


def _min_steps(plain: CountedForecast, phases: Sequence[str]) -> int:
    """Returns the number of batches in the shortest training round of the phases."""
    runs = [
        run for phase in plain.phases if phase.name in phases for run in phase.runs if run.trains
    ]
    return min((run.steps // run.parts for run in runs), default=1)


def _compute_latency_share(plain: CountedForecast, network: Network) -> float:
    """Returns the share of latency in a forecast's time."""
    instant = replace(network, latency_s=0.0)
    time_s, rest_s = (
        sum(network_.seconds(phase.name, phase.runs) for phase in plain.phases)
        for network_ in (network, instant)
    )
    return 1 - rest_s / time_s if time_s else 0.0
