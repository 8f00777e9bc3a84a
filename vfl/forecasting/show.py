"""Shows the result of ``vfl forecast`` as tables of bytes and time. The computing time of a step
can be measured by a run of a few rounds in this process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vfl.forecasting.network import (
    AROUND_BYTES_SHARE,
    AROUND_MESSAGE_BYTES,
    BatchWork,
    Network,
    format_duration,
    format_number,
    format_rate,
)
from vfl.forecasting.suggest import make_suggestions
from vfl.simulation.federation import combine_party_files
from vfl.summary.table import GLOSSARY, format_size, new_table, wide_console
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe, divide, name_file_in_errors
from vfl_common.errors import Code, InputError
from vfl_common.summary import ByteCount, LinkBytes, Summary, describe_label_exposure
from vfl_party.forecast.result import CountedForecast, PhaseForecast

if TYPE_CHECKING:
    from vfl_party.forecast.count import Outlook


def show_forecast(
    plan: Sequence[Path],
    network: Network,
    *,
    rows: int | None,
    rounds: Sequence[str],
    as_json: bool,
    measure: bool = False,
    suggest: bool = False,
    workers: int | None = None,
) -> None:
    """Runs the command ``vfl forecast`` and prints its result.

    ``plan``: a recipe, a party file, or all parties' files. ``measure``: whether to measure the
    computing time of a step. ``suggest``: whether to suggest settings. ``workers``: the number of
    processes of a party that mask ids; None: the time of masking is not included. Raises
    InputError.
    """
    # Imported here because it imports torch.
    from vfl_party.forecast.count import forecast_of, lone_party, read_outlook, read_rounds

    outlook = read_outlook(plan[0]) if len(plan) == 1 else _read_party_files(plan)
    ended_rounds = read_rounds(rounds)
    with name_file_in_errors(outlook.file):
        party, row_count = lone_party(outlook, rows)
        forecast = forecast_of(party, row_count, ended_rounds)
        if measure:
            network = measure_computation(outlook, network)
        if workers is not None:
            network = add_masking_time(outlook.recipe, network, workers)
        tried = make_suggestions(party, row_count, network, ended_rounds) if suggest else None
    if as_json:
        tables = as_tables(forecast, network) | (
            {"suggestions": tried.as_json()} if tried is not None else {}
        )
        click.echo(json.dumps(tables, separators=(",", ":")))
        return
    wide_console().print(render(forecast, network))
    if tried is not None:
        wide_console().print(tried.render())


def _read_party_files(paths: Sequence[Path]) -> Outlook:
    """Reads the files of all parties as one recipe for a forecast. Raises InputError."""
    from vfl_party.forecast.count import outlook_of

    tables, base = combine_party_files(paths)
    # The recipe's folder may contain the module of a custom encoder.
    sys.path.append(str(base))
    return replace(outlook_of(parse(Recipe, tables, "recipe"), base), file=paths[0])


def count_forecast(
    plan: Path, rows: int | None = None, rounds: Sequence[str] = ()
) -> CountedForecast:
    """Counts the bytes that a recipe, or the recipe of a party file, will exchange.

    Args:
        plan: the recipe or party file.
        rows: the number of rows that all parties hold; None: the number in the data.
        rounds: entries ``PHASE=N`` for phases that may end early.

    Raises InputError.
    """
    # Imported here because it imports torch.
    from vfl_party.forecast.count import forecast, read_outlook, read_rounds

    outlook = read_outlook(plan)
    with name_file_in_errors(outlook.file):
        return forecast(outlook, rows, read_rounds(rounds))


def sum_links(links: Iterable[LinkBytes]) -> ByteCount:
    """Returns the sums of payload bytes, message bytes and messages over ``links``."""
    links = list(links)
    return ByteCount(
        payload_bytes=sum(link.payload_bytes for link in links),
        message_bytes=sum(link.message_bytes for link in links),
        messages=sum(link.messages for link in links),
    )


def compute_seconds(network: Network, phase: PhaseForecast) -> float:
    """Returns the time of a phase's steps."""
    return network.seconds(phase.name, phase.runs)


def as_tables(forecast: CountedForecast, network: Network) -> dict[str, Any]:
    """Returns the whole forecast as JSON values."""
    phases = [
        phase.model_dump()
        | sum_links(link for link in forecast.links if link.phase == phase.name).model_dump()
        | {"seconds": compute_seconds(network, phase)}
        for phase in forecast.phases
    ]
    whole = sum_links(forecast.links).model_dump() | {
        "seconds": sum(phase["seconds"] for phase in phases)
    }
    return forecast.model_dump() | {
        "bandwidth_bit_s": network.bandwidth,
        "latency_s": network.latency_s,
        "step_s": {
            phase.name: network.work.get(phase.name, network.any_work).loop_s
            for phase in forecast.phases
        },
        "phases": phases,
        "total": whole,
    }


def render(forecast: CountedForecast, network: Network) -> Group:
    """Returns the tables and the notes below them."""
    parts: list[Text | Table] = [
        Text.assemble("\n", (forecast.recipe, "bold"), f" · {forecast.rows:,} rows\n")
    ]
    parts += [
        _make_party_table(forecast),
        Text(),
        _make_phase_table(forecast, network),
        Text(),
        _make_exchange_table(forecast),
        Text(),
    ]
    if forecast.encoders:
        parts += [_make_encoder_table(forecast), Text()]
    return Group(*parts, *(Text(sentence) for sentence in make_notes(forecast, network)), Text())


def make_notes(forecast: CountedForecast, network: Network) -> list[str]:
    """Returns the notes below the tables."""
    lines = []
    for phase in forecast.phases:
        if phase.unknown:
            lines.append(
                f"{phase.name}: the method {phase.kind} does not declare its exchanges, so they "
                "are not counted."
            )
        if phase.at_most:
            lines.append(
                f"{phase.name} may end early, so its numbers are upper bounds; --rounds "
                f"{phase.name}=N counts N rounds."
            )
        if phase.bound:
            lines.append(f"{phase.name}: {phase.bound}.")
    if forecast.encoders:
        lines.append(
            "FLOPs are for a forward pass, and a multiplication with an addition counts as two. "
            "Training takes about three times as many. Kept is the memory for the backward pass, "
            "for each row of a batch."
        )
    lines += _make_time_notes(forecast, network)
    if not any(phase.unknown for phase in forecast.phases):
        lines += filter(None, [describe_label_exposure(forecast.exchanges)])
    lines.append("Not counted: the sessions with the server (control), which grow with time.")
    lines.append(GLOSSARY)
    return lines


def _make_time_notes(forecast: CountedForecast, network: Network) -> list[str]:
    """Returns the notes about the parts of the time that are included."""
    lines = [
        f"Time at {format_rate(network.bandwidth)} a link and {network.latency_s * 1000:g} ms one "
        f"way, TLS and HTTP/2 ({AROUND_MESSAGE_BYTES} bytes a message and "
        f"{100 * AROUND_BYTES_SHARE:.2g} %) included; TCP and IP, 3 to 4 %, and connecting, "
        "come on top."
    ]
    works = {
        phase.name: network.work.get(phase.name, network.any_work)
        for phase in forecast.phases
        if phase.runs
    }
    if network.masking_s:
        lines.append(
            f"Masking of ids, measured here: {1e3 * network.masking_s:.2g} ms a batch. The time of "
            "the server's comparison is not included."
        )
    if not any(work.loop_s for work in works.values()):
        return [
            *lines,
            f"{'Other computation' if network.masking_s else 'Computation'} is not included: "
            "set it by --step-time, or measure it by --measure.",
        ]
    if network.work:
        what = ", ".join(
            f"{name} {1e3 * works[name].loop_s:.2g} ms" for name in works if name in network.work
        )
        shared = f"; all parties share {network.cores} cores" if network.cores is not None else ""
        return [*lines, f"Computation, measured here in one process, a step: {what}{shared}."]
    return [
        *lines,
        f"Computation: {1e3 * network.any_work.loop_s:g} ms a step that trains, as "
        "set by --step-time.",
    ]


def _make_party_table(forecast: CountedForecast) -> Table:
    table = new_table("Message bytes by party, direction and phase")
    table.add_column("party")
    table.add_column("direction")
    for heading in (*(phase.name for phase in forecast.phases), "all", "payload"):
        table.add_column(heading, justify="right")
    for party in (forecast.server, *forecast.parties):
        ends = (
            ("sent", [link for link in forecast.links if link.sender == party]),
            ("received", [link for link in forecast.links if link.receiver == party]),
        )
        if not any(own for _, own in ends):
            # The server exchanges nothing if nothing is averaged.
            continue
        for direction, own in ends:
            whole = sum_links(own)
            table.add_row(
                party if direction == "sent" else "",
                direction,
                *(
                    _format_cell(phase, sum_links(link for link in own if link.phase == phase.name))
                    for phase in forecast.phases
                ),
                format_size(whole.message_bytes),
                format_size(whole.payload_bytes),
            )
    return table


def _make_exchange_table(forecast: CountedForecast) -> Table:
    table = new_table("Exchanges, and the chain through which their tensors leave")
    for heading in ("phase", "exchange", "from", "to", "carries", "through", "when"):
        table.add_column(heading, overflow="fold")
    before = ""
    for line in forecast.exchanges:
        phase = "" if line.phase == before else line.phase
        before = line.phase
        table.add_row(
            phase, line.exchange, line.sender, line.receiver, line.carries, line.chain, line.when
        )
    return table


def _make_encoder_table(forecast: CountedForecast) -> Table:
    table = new_table("Computation and memory of each encoder")
    table.add_column("party")
    for heading in ("rows", "weights", "as bytes", "FLOPs a row", "FLOPs a pass", "kept a row"):
        table.add_column(heading, justify="right")
    for load in forecast.encoders:
        table.add_row(
            load.party,
            f"{load.rows:,}",
            f"{load.weights:,}",
            format_size(load.weight_bytes),
            format_number(load.flops_a_row),
            format_number(load.flops_a_row * load.rows),
            format_size(load.kept_bytes_a_row),
        )
    return table


def _format_cell(phase: PhaseForecast, count: ByteCount) -> str:
    if phase.unknown:
        return "?"
    return format_size(count.message_bytes) if count.message_bytes else "–"


def _make_phase_table(forecast: CountedForecast, network: Network) -> Table:
    whole, trips = sum_links(forecast.links), sum(phase.round_trips for phase in forecast.phases)
    time_s = sum(compute_seconds(network, phase) for phase in forecast.phases)
    table = new_table("By phase, every message counted once", show_footer=True)
    table.add_column("phase", "all")
    table.add_column("payload", format_size(whole.payload_bytes), justify="right")
    table.add_column(
        "envelope", format_size(whole.message_bytes - whole.payload_bytes), justify="right"
    )
    table.add_column("message bytes", format_size(whole.message_bytes), justify="right")
    table.add_column("messages", f"{whole.messages:,}", justify="right")
    table.add_column("round trips", f"{trips:,}", justify="right")
    table.add_column("time", format_duration(time_s), justify="right")
    for phase in forecast.phases:
        if phase.unknown:
            table.add_row(phase.name, *"??????")
            continue
        count = sum_links(link for link in forecast.links if link.phase == phase.name)
        table.add_row(
            phase.name,
            format_size(count.payload_bytes),
            format_size(count.message_bytes - count.payload_bytes),
            format_size(count.message_bytes),
            f"{count.messages:,}",
            f"{phase.round_trips:,}",
            format_duration(compute_seconds(network, phase)),
        )
    return table


_ROUNDS = 2
_STEPS = 40
_SHORT = {"epochs": _ROUNDS, "rounds": _ROUNDS, "trees": _ROUNDS, "steps": _STEPS}


def measure_computation(outlook: Outlook, network: Network) -> Network:
    """Returns ``network`` with the measured computing time of a step for each phase. Raises
    InputError if the recipe names no data.
    """
    from vfl.simulation.inprocess import run_in_process
    from vfl_party.forecast.count import forecast, outlook_of

    if outlook.recipe.simulate is None or outlook.folder is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "--measure: needs a recipe with [simulate.parties.NAME], the data of each party "
            "(docs/how-to/recipes/write-a-recipe.md). Add it, or give --step-time instead.",
        )
    recipe = shorten_phases(outlook.recipe)
    steps_by_phase = {
        phase.name: sum(run.times * run.steps // run.parts for run in phase.runs if run.trains)
        for phase in forecast(outlook_of(recipe, outlook.folder)).phases
    }
    data = divide(recipe, outlook.folder)
    with tempfile.TemporaryDirectory(prefix="vfl-measure-") as folder:
        # The first run is not used, because it includes torch's one-time initialisation.
        for run_name in ("warm", "measured"):
            summary = run_in_process(recipe, data, Path(folder) / run_name, modules=outlook.folder)
    work = {
        name: batch_work
        for name, steps in steps_by_phase.items()
        if (batch_work := compute_batch_work(summary, name, steps)) is not None
    }
    return replace(network, work=work)


def add_masking_time(recipe: Recipe, network: Network, workers: int) -> Network:
    """Returns ``network`` with the measured time to mask a batch of ids with ``workers`` processes
    of each party. Raises InputError if the recipe masks no ids.
    """
    from vfl_party.align import masking_time

    if recipe.rows.align != "psi" or not recipe.passives:
        raise InputError(
            Code.CONFIG_INVALID,
            '--workers: needs rows.align = "psi" and a passive party. Leave --workers out.',
        )
    # In the first round, a party also masks its own rows.
    rounds = len(recipe.passives)
    return replace(network, masking_s=masking_time.measure_masking().batch_s(workers, rounds))


def shorten_phases(recipe: Recipe) -> Recipe:
    """Returns a recipe whose phases have a few rounds, and no early stopping."""
    tables = recipe.model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        settings: dict[str, Any] = phase.pop("settings", {})
        settings.pop("early_stopping", None)
        phase |= settings | {
            key: min(limit, settings[key]) for key, limit in _SHORT.items() if settings.get(key)
        }
    return parse(Recipe, tables, "recipe")


def compute_batch_work(summary: Summary, phase: str, steps: int) -> BatchWork | None:
    """Returns the computing time of a step of ``phase``; None if the phase has no steps.

    ``steps``: the number of steps in the measured run. The passive parties compute at the same
    time, and then the active party. The processor time is the sum over all parties. It does not
    include gRPC and TLS, because the run is in one process.
    """
    times_by_role: dict[str, list[float]] = {"active": [], "passive": []}
    cpu_s = 0.0
    for party in summary.parties:
        for times in party.times:
            if times.phase == phase and party.role in times_by_role:
                times_by_role[party.role].append(times.busy_s / max(1, steps))
                cpu_s += times.cpu_s
    if not (steps and times_by_role["passive"]):
        return None
    active_s, passive_s = max(times_by_role["active"], default=0.0), max(times_by_role["passive"])
    return BatchWork(active_s + passive_s, max(active_s, passive_s), cpu_s / steps)
