"""Latency, throughput and memory of a served model, beside two FastAPI processes written by hand:
``python -m benchmarks.serve [--seconds 6] [--repeats 3] [--far] [--faults] [--minutes 10]
[--mlperf PYTHON] [--json FILE]``.

Two parties hold the columns of scikit-learn's digits. *Poisson*: single ids come at random moments,
100 a second, whether those before are answered or not, so waiting counts. The other requests, of
one id or 256, come over 16 connections, each after its answer. Both contestants take turns. One
thread generates the load; it shares the cores with the programs.

``--far``: a round trip of 40 ms between the parties (``benchmarks.link``). ``--faults``: the passive
party is frozen, killed and slow under load. ``--minutes``: memory under load. ``--mlperf``: single ids
as MLPerf's load generator sends them (``benchmarks.serve_mlperf``).
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.load import closed, for_seconds, poisson, quantile, request
from benchmarks.serve_faults import faults
from benchmarks.serve_programs import IDS, Ours, Programs, by_hand, trained

RATE = 100.0
_CONNECTIONS, _MANY = 16, 256
_ONE = [request([each]) for each in IDS]
_SEVERAL = [
    # A benchmark's choice of ids.
    request(random.Random(at).choices(IDS, k=_MANY))  # noqa: S311
    for at in range(50)
]
# One way.
_FAR_MS = 20
_MEMORY_S = 30.0
Found = dict[str, float]


def measured(programs: Programs, seconds: float) -> Found:
    """Measures one contestant once. ``cpu_ms``: of all its programs, for a single id that comes
    alone, and for one of many at once.
    """
    url, cpu_s = programs.url, [programs.cpu_s()]
    alone = poisson(url, _ONE, for_seconds(seconds), RATE)
    cpu_s.append(programs.cpu_s())
    single = closed(url, _ONE, for_seconds(seconds), _CONNECTIONS)
    cpu_s.append(programs.cpu_s())
    several = closed(url, _SEVERAL, for_seconds(seconds), _CONNECTIONS, _MANY)
    return {
        "p50_ms": quantile(alone.answers, 0.5),
        "p99_ms": quantile(alone.answers, 0.99),
        "ids_s": single.a_second,
        "rows_s": _MANY * several.a_second,
        "cpu_ms_alone": 1000 * (cpu_s[1] - cpu_s[0]) / len(alone.answers),
        "cpu_ms_many": 1000 * (cpu_s[2] - cpu_s[1]) / len(single.answers),
        "load_cpu_ms": 1000 * single.cpu_s / len(single.answers),
        "failed": float(sum(len(each.failed) for each in (alone, single, several))),
    }


def beside(contestants: dict[str, Programs], seconds: float, repeats: int) -> dict[str, Any]:
    """Measures both in turns; says the medians, and those of the turns' ratios."""
    turns: dict[str, list[Found]] = {name: [] for name in contestants}
    for programs in contestants.values():
        closed(programs.url, _ONE, for_seconds(1.0), _CONNECTIONS)
    for _turn in range(repeats):
        for name, programs in contestants.items():
            turns[name].append(measured(programs, seconds))
    for name, found in turns.items():
        middle = {key: median(each[key] for each in found) for key in found[0]}
        click.echo(f"{name:9} " + "  ".join(f"{key} {middle[key]:,.2f}" for key in middle))
    ours, hand = turns.values()
    ratios = {
        key: median(a[key] / b[key] for a, b in zip(ours, hand, strict=True))
        for key in ("ids_s", "rows_s")
    }
    click.echo("ratio     " + "  ".join(f"{key} {ratios[key]:.2f}" for key in ratios))
    return {**turns, "ratio": ratios}


def far(programs: Programs, seconds: float) -> Found:
    """Measures single ids over the slow link."""
    closed(programs.url, _ONE, for_seconds(1.0), _CONNECTIONS)
    load = poisson(programs.url, _ONE, for_seconds(seconds), RATE)
    found = {f"p{share}_ms": quantile(load.answers, share / 100) for share in (50, 99)}
    found["failed"] = float(len(load.failed))
    click.echo("40 ms     " + "  ".join(f"{key} {found[key]:,.1f}" for key in found))
    return found


def memory(programs: Programs, minutes: float) -> list[Found]:
    """Samples the resident memory of both programs, MiB, while single ids and many come."""
    found: list[Found] = []
    ended = threading.Event()

    def watch() -> None:
        began_s = time.monotonic()
        while not ended.wait(_MEMORY_S):
            found.append({"s": time.monotonic() - began_s, **programs.rss_mib()})
            click.echo("memory    " + "  ".join(f"{k} {v:,.1f}" for k, v in found[-1].items()))

    watching = threading.Thread(target=watch)
    watching.start()
    going = for_seconds(60.0 * minutes)
    answered, failed = 0, 0
    while going():
        single = poisson(programs.url, _ONE, for_seconds(10.0), 2 * RATE)
        several = closed(programs.url, _SEVERAL, for_seconds(1.0), 4, _MANY)
        answered += len(single.answers) + len(several.answers)
        failed += len(single.failed) + len(several.failed)
    ended.set()
    watching.join()
    click.echo(f"memory    {answered:,} requests, {failed} failed")
    return found


@click.command(help=__doc__)
@click.option("--seconds", default=6.0, show_default=True, help="Of each measurement.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--far", "far_", is_flag=True, help="Measure over a round trip of 40 ms, too.")
@click.option("--faults", "faults_", is_flag=True, help="Freeze, kill and slow down a party, too.")
@click.option("--mlperf", metavar="PYTHON", help="Use MLPerf's load generator, too.")
@click.option("--minutes", default=0.0, help="Watch memory so long, and nothing else.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all that was found.")
def main(
    seconds: float,
    repeats: int,
    far_: bool,
    faults_: bool,
    mlperf: str | None,
    minutes: float,
    path: Path | None,
) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        run = trained(folder)
        with ExitStack() as stack:
            ours = Ours(folder, run, stack)
            programs = ours.start_all()
            if minutes:
                found["memory"] = memory(programs, minutes)
            else:
                hand = by_hand(folder, stack)
                found |= beside({"ours": programs, "by hand": hand}, seconds, repeats)
            if mlperf:
                words = [mlperf, "-m", "benchmarks.serve_mlperf", programs.url, str(2 * seconds)]
                told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
                found["mlperf"] = json.loads(told.splitlines()[-1])
                click.echo(f"mlperf    {found['mlperf']}")
            if faults_:
                found["faults"] = faults(ours, _ONE, RATE)
        if far_:
            with ExitStack() as stack:
                found["far"] = far(Ours(folder, run, stack, _FAR_MS).start_all(), 2 * seconds)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
