"""``vfl forecast``: the exchanges that a recipe's phases declare, as tables of bytes and time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vfl.forecasting.measure import measure as measure_steps
from vfl.forecasting.measure import with_masking
from vfl.forecasting.network import AROUND_BYTES_SHARE, AROUND_MESSAGE_BYTES, Network
from vfl.forecasting.suggest import suggestions
from vfl.forecasting.words import duration, number, rate
from vfl.report.table import WORDS, new_table, size, wide_console
from vfl.simulation.own_files import of_party_files
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe, naming
from vfl_common.summary import ByteCount, LinkBytes, label_statement
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
    """Runs the command.

    ``plan``: a recipe, a party file, or all parties' files. ``measure``: whether to measure the
    computing time of a step. ``suggest``: whether to try settings. ``workers``: processes of a
    party that mask ids; None: their time is not counted. Raises InputError.
    """
    # Imported late: it imports torch.
    from vfl_party.forecast.count import forecast_of, lone_party, read_outlook, read_rounds

    outlook = read_outlook(plan[0]) if len(plan) == 1 else _of_files(plan)
    ended = read_rounds(rounds)
    with naming(outlook.file):
        party, known = lone_party(outlook, rows)
        forecast = forecast_of(party, known, ended)
        if measure:
            network = measure_steps(outlook, network)
        if workers is not None:
            network = with_masking(outlook.recipe, network, workers)
        tried = suggestions(party, known, network, ended) if suggest else None
    if as_json:
        tables = as_tables(forecast, network) | (
            {"suggestions": tried.as_json()} if tried is not None else {}
        )
        click.echo(json.dumps(tables, separators=(",", ":")))
        return
    wide_console().print(render(forecast, network))
    if tried is not None:
        wide_console().print(tried.render())


def _of_files(paths: Sequence[Path]) -> Outlook:
    """Returns the outlook of party files together. Raises InputError."""
    from vfl_party.forecast.count import outlook_of

    tables, base = of_party_files(paths)
    # The user's own encoder may be there.
    sys.path.append(str(base))
    return replace(outlook_of(parse(Recipe, tables, "recipe"), base), file=paths[0])


def count_forecast(
    plan: Path, rows: int | None = None, rounds: Sequence[str] = ()
) -> CountedForecast:
    """Counts what a recipe, or the recipe of a party file, will exchange.

    Args:
        plan: the recipe or party file.
        rows: the number of rows that all parties hold; None: the number in the data.
        rounds: entries ``PHASE=N`` for phases that may end early.

    Raises InputError.
    """
    # Imported late: it imports torch.
    from vfl_party.forecast.count import forecast, read_outlook, read_rounds

    outlook = read_outlook(plan)
    with naming(outlook.file):
        return forecast(outlook, rows, read_rounds(rounds))


def total(links: Iterable[LinkBytes]) -> ByteCount:
    """Adds up ``links``."""
    links = list(links)
    return ByteCount(
        payload_bytes=sum(link.payload_bytes for link in links),
        message_bytes=sum(link.message_bytes for link in links),
        messages=sum(link.messages for link in links),
    )


def seconds(network: Network, phase: PhaseForecast) -> float:
    """Returns the time of a phase's steps."""
    return network.seconds(phase.name, phase.runs)


def as_tables(forecast: CountedForecast, network: Network) -> dict[str, Any]:
    """Returns the whole forecast as JSON values."""
    phases = [
        phase.model_dump()
        | total(link for link in forecast.links if link.phase == phase.name).model_dump()
        | {"seconds": seconds(network, phase)}
        for phase in forecast.phases
    ]
    whole = total(forecast.links).model_dump() | {
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
        _by_party(forecast),
        Text(),
        _by_phase(forecast, network),
        Text(),
        _by_exchange(forecast),
        Text(),
    ]
    if forecast.encoders:
        parts += [_by_encoder(forecast), Text()]
    return Group(*parts, *(Text(sentence) for sentence in notes(forecast, network)), Text())


def notes(forecast: CountedForecast, network: Network) -> list[str]:
    """Returns the notes below the tables."""
    lines = []
    for phase in forecast.phases:
        if phase.unknown:
            lines.append(
                f"{phase.name}: the method {phase.kind} does not declare its exchanges: "
                "they are not counted."
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
            "FLOPs are those of a forward pass, with two for a multiplication and an addition; "
            "training takes about three times as many. Kept is the memory of the backward pass "
            "for each row of a batch."
        )
    lines += _of_time(forecast, network)
    if not any(phase.unknown for phase in forecast.phases):
        lines += filter(None, [label_statement(forecast.exchanges)])
    lines.append("Not counted: the sessions with the server (control), which grow with time.")
    lines.append(WORDS)
    return lines


def _of_time(forecast: CountedForecast, network: Network) -> list[str]:
    """Returns the notes on the components of the time."""
    lines = [
        f"Time at {rate(network.bandwidth)} a link and {network.latency_s * 1000:g} ms one way, "
        f"TLS and HTTP/2 ({AROUND_MESSAGE_BYTES} bytes a message and "
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


def _by_party(forecast: CountedForecast) -> Table:
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
            whole = total(own)
            table.add_row(
                party if direction == "sent" else "",
                direction,
                *(
                    _cell(phase, total(link for link in own if link.phase == phase.name))
                    for phase in forecast.phases
                ),
                size(whole.message_bytes),
                size(whole.payload_bytes),
            )
    return table


def _by_exchange(forecast: CountedForecast) -> Table:
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


def _by_encoder(forecast: CountedForecast) -> Table:
    table = new_table("Computation and memory of each encoder")
    table.add_column("party")
    for heading in ("rows", "weights", "as bytes", "FLOPs a row", "FLOPs a pass", "kept a row"):
        table.add_column(heading, justify="right")
    for load in forecast.encoders:
        table.add_row(
            load.party,
            f"{load.rows:,}",
            f"{load.weights:,}",
            size(load.weight_bytes),
            number(load.flops_a_row),
            number(load.flops_a_row * load.rows),
            size(load.kept_bytes_a_row),
        )
    return table


def _cell(phase: PhaseForecast, count: ByteCount) -> str:
    if phase.unknown:
        return "?"
    return size(count.message_bytes) if count.message_bytes else "–"


def _by_phase(forecast: CountedForecast, network: Network) -> Table:
    whole, trips = total(forecast.links), sum(phase.round_trips for phase in forecast.phases)
    time_s = sum(seconds(network, phase) for phase in forecast.phases)
    table = new_table("By phase, every message counted once", show_footer=True)
    table.add_column("phase", "all")
    table.add_column("payload", size(whole.payload_bytes), justify="right")
    table.add_column("envelope", size(whole.message_bytes - whole.payload_bytes), justify="right")
    table.add_column("message bytes", size(whole.message_bytes), justify="right")
    table.add_column("messages", f"{whole.messages:,}", justify="right")
    table.add_column("round trips", f"{trips:,}", justify="right")
    table.add_column("time", duration(time_s), justify="right")
    for phase in forecast.phases:
        if phase.unknown:
            table.add_row(phase.name, *"??????")
            continue
        count = total(link for link in forecast.links if link.phase == phase.name)
        table.add_row(
            phase.name,
            size(count.payload_bytes),
            size(count.message_bytes - count.payload_bytes),
            size(count.message_bytes),
            f"{count.messages:,}",
            f"{phase.round_trips:,}",
            duration(seconds(network, phase)),
        )
    return table
