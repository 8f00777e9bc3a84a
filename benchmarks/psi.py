"""What private alignment costs: ``python -m benchmarks.psi [--ids N] [--peer-python PATH]
[--resume]
[--engine rr22] [--spu]``.

A server and two parties, each in a process of its own, over gRPC with mutual TLS, find the half of
N ids a side that both have. With ``--peer-python``, the interpreter of an environment with
``openmined-psi``, that package takes turns with ours. With ``--resume``, one party is killed at 30,
60 and 90 % of its masking, and started again at once; the table then has the ids that the parties
masked over those that have to be. With ``--masking N``, one party's masking with N workers, without
a network, stands beside what ``vfl forecast --workers`` reckons with. 10 million ids a side take
ten minutes of two cores: ``python -m benchmarks.psi --ids 10000000``. With ``--spu``, both of our
engines take turns with the wheel ``spu`` alone, by RR22 and by ECDH on Curve25519.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import psi_spu
from benchmarks.psi_run import ACTIVE, PARTIES, Cost, Run, write_tables
from vfl_party.align import batches, masking_time

KILLED_AT = (0.3, 0.6, 0.9)
_PEER_S = 600.0


def align(
    ids: int, engine: str = "x25519", *, memory: int = 256, kill: str = "", at: float = 0.0
) -> Cost:
    """Aligns once, with ``memory`` MiB as data.memory_mib; with ``kill``, that party is killed when
    the share ``at`` of its masking is done.
    """
    with tempfile.TemporaryDirectory(prefix="vfl-psi-") as place:
        folder = Path(place)
        with Run(
            ids, write_tables(ids, folder, memory_mib=memory), folder, engine, count=bool(kill)
        ) as run:
            if kill:
                run.wait(lambda: run.share(kill) >= at)
                run.kill(kill)
                run.start(kill)
            return run.finish()


def ask_peer(python: Path, ids: int) -> dict[str, Any]:
    """Has ``openmined-psi`` do the same, see ``psi_peer``."""
    args = [str(python), str(Path(__file__).with_name("psi_peer.py")), str(ids)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=_PEER_S, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"the peer ended with {done.returncode}: {done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["common"] != ids - ids // 2:
        raise click.ClickException(f"the peer found {found['common']} ids in common")
    return found


def print_costs(costs: list[Cost], console: Console) -> None:
    table = Table("ids a side", "alignment", "ids a second", "bytes an id", "whole run")
    for each in costs:
        speed = f"{each.ids / each.seconds:,.0f}"
        table.add_row(
            f"{each.ids:,}",
            f"{each.seconds:.1f} s",
            speed,
            f"{each.bytes_an_id:.2f}",
            f"{each.run_s:.1f} s",
        )
    console.print(table)
    memory = Table("process", "peak resident memory", "of it anonymous")
    both = [costs[-1].peak_mib, costs[-1].anonymous_mib]
    for name in both[0]:
        memory.add_row(name.rpartition(" ")[0], *(f"{each[name]:.0f} MiB" for each in both))
    for party in PARTIES:
        totals = (sum(each[name] for name in each if name.startswith(party)) for each in both)
        memory.add_row(f"{party} and workers, together", *(f"{each:.0f} MiB" for each in totals))
    console.print(memory)


def race(
    ids: int, python: Path, repeats: int, console: Console
) -> tuple[list[Cost], list[dict[str, Any]]]:
    """Has both take turns, and prints the medians."""
    ours, peers = [], []
    for _ in range(repeats):
        ours.append(align(ids))
        peers.append(ask_peer(python, ids))
    print_costs(ours, console)
    table = Table("contestant", "median", "min - max", "bytes an id")
    times = {
        "ours": [each.seconds for each in ours],
        "openmined-psi": [each["seconds"] for each in peers],
    }
    sizes = {"ours": ours[0].bytes_an_id, "openmined-psi": peers[0]["message_bytes"] / ids}
    for name, seconds in times.items():
        ends = f"{min(seconds):.2f} - {max(seconds):.2f}"
        table.add_row(name, f"{statistics.median(seconds):.2f} s", ends, f"{sizes[name]:.1f}")
    console.print(table)
    ratio = statistics.median(times["openmined-psi"]) / statistics.median(times["ours"])
    console.print(f"openmined-psi takes {ratio:.2f} times as long")
    return ours, peers


def race_spu(ids: int, repeats: int, memory: int, console: Console) -> list[Cost]:
    """Has both engines and ``spu`` alone take turns, and prints the medians."""
    costs: dict[str, list[Cost]] = {"rr22": [], "x25519": []}
    alone: dict[str, list[dict[str, Any]]] = {name: [] for name in psi_spu.PROTOCOLS}
    with tempfile.TemporaryDirectory(prefix="vfl-spu-") as place:
        inputs = Path(place) / "0.csv", Path(place) / "1.csv"
        for number, path in enumerate(inputs):
            rows = np.random.default_rng(number).permutation(ids) + number * (ids // 2)
            lines = "\n".join(f"customer-{row:09d}" for row in rows.tolist())
            path.write_text(f"id\n{lines}\n")
        for _ in range(repeats):
            for engine, found in costs.items():
                found.append(align(ids, engine, memory=memory))
            for protocol, others in alone.items():
                others.append(psi_spu.run(inputs, protocol))
                if len(others[-1].pop("common")) != ids - ids // 2:
                    raise click.ClickException(f"spu by {protocol} found other rows")
    for engine, found in costs.items():
        console.print(engine)
        print_costs(found, console)
    table = Table("contestant", "median", "min - max", "CPU seconds of both")
    times = {name: [each.seconds for each in found] for name, found in costs.items()}
    cpu = dict.fromkeys(costs, "")
    for protocol, others in alone.items():
        times[f"spu, {protocol}"] = [each["seconds"] for each in others]
        cpu[f"spu, {protocol}"] = f"{statistics.median(each['cpu_s'] for each in others):.1f}"
    for name, seconds in times.items():
        ends = f"{min(seconds):.2f} - {max(seconds):.2f}"
        table.add_row(name, f"{statistics.median(seconds):.2f} s", ends, cpu[name])
    console.print(table)
    ratio = statistics.median(times["rr22"]) / statistics.median(times["spu, RR22"])
    console.print(f"rr22 takes {ratio:.2f} times as long as spu alone")
    return [*costs["rr22"], *costs["x25519"]]


def resume(ids: int, killed: str, console: Console) -> list[Cost]:
    """Kills a party at each share, in a run of its own, and prints what was masked again."""
    table = Table("killed", "at", "alignment", "masked again")
    costs = []
    for at in KILLED_AT:
        costs.append(align(ids, kill=killed, at=at))
        again = f"{100 * (costs[-1].masked - 1):.1f} %"
        table.add_row(killed, f"{at:.0%}", f"{costs[-1].seconds:.1f} s", again)
    console.print(table)
    return costs


def masking(ids: int, workers: int, console: Console) -> None:
    """Masks ``ids`` ids of a party's own and as many of another, and prints the time beside that of
    the model; also, by counting, of more workers.
    """
    model = masking_time.measure_masking()
    took_s, _ = masking_time.time_masking(ids, workers)
    table = Table("workers", "measured, a million ids", "forecast", "forecast / measured")
    million = 1e6 / batches.BATCH
    for each in sorted({workers, 16, 64}):
        said_s = model.batch_s(each)
        measured = (f"{took_s * million:.1f} s", f"{said_s / took_s:.2f}")
        here, ratio = measured if each == workers else ("", "")
        table.add_row(str(each), here, f"{said_s * million:.1f} s", ratio)
    console.print(table)


@click.command(help=__doc__)
@click.option(
    "--ids", default=1_000_000, show_default=True, type=click.IntRange(min=2), help="On each side."
)
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(min=1), help="Turns.")
@click.option(
    "--peer-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also time the peer.",
)
@click.option(
    "--resume", "resumes", is_flag=True, help="Kill a party, and count what is masked again."
)
@click.option(
    "--kill",
    "killed",
    type=click.Choice(PARTIES),
    default=ACTIVE,
    show_default=True,
    help="For --resume.",
)
@click.option(
    "--masking",
    "workers",
    type=click.IntRange(min=1),
    help="Time one party's masking alone, with so many workers.",
)
@click.option(
    "--memory",
    default=256,
    show_default=True,
    help="data.memory_mib; less shows with few ids what many take.",
)
@click.option(
    "--engine",
    type=click.Choice(("rr22", "x25519")),
    default="x25519",
    show_default=True,
    help="rows.psi.engine.",
)
@click.option("--spu", is_flag=True, help="Also time the other engine, and spu alone.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write every turn here.",
)
def main(
    ids: int,
    repeats: int,
    peer_python: Path | None,
    resumes: bool,
    killed: str,
    workers: int | None,
    memory: int,
    engine: str,
    spu: bool,
    json_path: Path | None,
) -> None:
    """Run what was asked for, and print tables."""
    console = Console(width=None if Console().is_terminal else 120)
    if workers is not None:
        masking(ids, workers, console)
        return
    peers: list[dict[str, Any]] = []
    if resumes:
        costs = resume(ids, killed, console)
    elif spu:
        costs = race_spu(ids, repeats, memory, console)
    elif peer_python is not None:
        costs, peers = race(ids, peer_python, repeats, console)
    else:
        costs = [align(ids, engine, memory=memory) for _ in range(repeats)]
        print_costs(costs, console)
    if json_path is not None:
        json_path.write_text(
            json.dumps({"ours": [asdict(each) for each in costs], "peer": peers}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
