"""What watching costs a run: ``python -m benchmarks.watch [--turns 5] [--seconds 12]``.

A federation of four parties and a server trains on this machine: without a page, with a page that
nobody looks at, with one viewer, and with ten. The four take turns, in an order that changes, so
that other work on the machine meets all of them alike. Steps a second are those of the active
party's ``metrics.jsonl`` after its first rounds. Beside them stands the processor time of the
page's process as a share of one core: what it took from the run at most.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import psutil

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "digits.toml"
# {name: viewers; None: no page}.
CASES: dict[str, int | None] = {"no page": None, "nobody": 0, "one": 1, "ten": 10}
# Rounds in which programs and caches warm up.
_WARM = 20
_ACTIVE = "bank"


def look(link: str, done: threading.Event) -> None:
    """Takes a page's events until ``done``, as a browser would."""
    parts = urlsplit(link)
    asking = http.client.HTTPConnection(parts.netloc, timeout=30)
    asking.request("GET", f"/?{parts.query}")
    answer = asking.getresponse()
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    answer.read()
    asking.request("GET", "/events", headers={"Cookie": cookie})
    answer = asking.getresponse()
    while not done.is_set() and answer.readline():
        pass
    asking.close()


def turn(viewers: int | None, seconds: float, out: Path) -> dict[str, float]:
    """Runs one federation for ``seconds`` after its warm-up; returns its figures."""
    recipe = out / "recipe.toml"
    recipe.write_text(RECIPE.read_text().replace("epochs = 30", "epochs = 100000"))
    done = threading.Event()
    vfl = [sys.executable, "-m", "vfl"]
    with (out / "said").open("w") as said:
        run = subprocess.Popen(
            [*vfl, "simulate", str(recipe), "--out", str(out / "runs")], stdout=said, stderr=said
        )
    page: subprocess.Popen[str] | None = None
    lookers: list[threading.Thread] = []
    try:
        path = wait_for(out / "runs")
        if viewers is not None:
            page = subprocess.Popen(
                [*vfl, "watch", str(out / "runs")], stdout=subprocess.PIPE, text=True
            )
            link = page.stdout.readline().strip() if page.stdout is not None else ""
            lookers = [
                threading.Thread(target=look, args=[link, done], daemon=True)
                for _ in range(viewers)
            ]
            for each in lookers:
                each.start()
        while len(lines(path)) < _WARM:
            time.sleep(0.1)
        began, cpu_s, begin_s = len(lines(path)), cpu(page), time.perf_counter()
        time.sleep(seconds)
        took_s, share = time.perf_counter() - begin_s, cpu(page) - cpu_s
        found = lines(path)[began - 1 :]
    finally:
        done.set()
        for process in (page, run):
            if process is not None:
                process.terminate()
                process.wait(20)
        for each in lookers:
            each.join(5)
    steps = found[-1]["steps"] - found[0]["steps"]
    # Both times are of the run's own clock.
    return {"steps": steps / (found[-1]["seconds"] - found[0]["seconds"]), "cpu": share / took_s}


def wait_for(runs: Path) -> Path:
    """Waits for the active party's first round; returns its file."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        found = list(runs.glob(f"*/{_ACTIVE}/metrics.jsonl"))
        if found:
            return found[0]
        time.sleep(0.1)
    raise click.ClickException("the run has not begun within 60 s")


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file of rounds."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def cpu(process: subprocess.Popen[str] | None) -> float:
    """Returns the processor seconds of a process so far."""
    if process is None:
        return 0.0
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def show(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Words the figures: medians, and the median of each turn's ratio to the run without a page."""
    said = [f"{'viewers':<10}{'steps/s':>10}{'of no page':>12}{'page, of a core':>17}"]
    plain: Sequence[float] = [each["steps"] for each in found["no page"]]
    for name, turns in found.items():
        ratio = statistics.median(
            each["steps"] / before for each, before in zip(turns, plain, strict=True)
        )
        steps = statistics.median(each["steps"] for each in turns)
        share = statistics.median(each["cpu"] for each in turns)
        said.append(f"{name:<10}{steps:>10.1f}{ratio:>12.3f}{share:>16.2%}")
    return said


@click.command()
@click.option("--turns", default=5, show_default=True, help="Runs of each case.")
@click.option("--seconds", default=12.0, show_default=True, help="Of each run, after its warm-up.")
def main(turns: int, seconds: float) -> None:
    """Measures what a page costs a run."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    names = list(CASES)
    for number in range(turns):
        for name in names[number % 4 :] + names[: number % 4]:
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(turn(CASES[name], seconds, Path(folder)))
            print(f"turn {number + 1}, {name}: {found[name][-1]['steps']:.1f} steps/s", flush=True)
    print("\n".join(show(found)))


if __name__ == "__main__":
    main()
