"""Run everything that only a GPU can show: ``python -m benchmarks.gpu [--device cuda] [--only STEP]
[--tiny] [--data DIR] [--out DIR]``.

Each step is a process with a time limit of its own, and prints a JSON object a line as it finds
something. They are written to ``OUT/gpu.json`` at once, so that a step that fails, or the end of
the time, loses nothing; what else a step says is in ``OUT/gpu.log``. Steps of one group run beside
each other, groups one after the other: those that measure time are alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
# The group whose steps measure time.
ALONE = 2
# Of what a failed step says.
_LAST_CHARACTERS = 4000


# Their parties are in pytest's own process.
IN_PROCESS = tuple(
    f"tests/integration/test_{name}.py"
    for name in ("defences", "task", "ranking", "fedcvt", "wire", "pipe", "mocosfl", "exact")
)


@dataclass(frozen=True)
class Step:
    """A module of this room with arguments, or, if it begins with ``-m``, another one."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    group: int


def steps(tiny: bool) -> list[Step]:
    """Return all steps, the most valuable first."""
    tests = ("tests/integration/test_gpu.py", "tests/unit/party/outbound/test_tensors.py")
    workers = ("-n", "2" if tiny else "6")
    plugin = ("-p", "benchmarks.gpu.everywhere", "--maxfail", "60", "--no-header", "--tb", "short")
    pytest = (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-p",
        "benchmarks.gpu.stream",
        *workers,
    )
    return [
        Step("tests", (*pytest, "-k", "gpu or cuda", *tests), 150, 0),
        Step("everywhere", (*pytest, *plugin, "-k", "not processes", *IN_PROCESS), 150, 0),
        Step("learn", ("learn",), 150, 0),
        Step("examples", ("examples",), 110, 1),
        Step("ranks", ("ranks",), 100, 1),
        Step("order", ("order",), 100, 1),
        Step("copies", ("copies",), 60, 2),
        Step("few", ("speed", "--few"), 120, 2),
        Step("speed", ("speed",), 400, 2),
        Step("kernels", ("kernels",), 40, 2),
    ]


@dataclass
class Report:
    """What was found so far; written after every line."""

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, step: str, line: str) -> None:
        """Take a line that a step has printed."""
        # pytest's dots may stand before it.
        if '{"what"' not in line:
            return
        line = line[line.index('{"what"') :]
        with self._lock:
            self.found.setdefault(step, {}).setdefault("found", []).append(json.loads(line))
            self._write()

    def end(self, step: str, code: int | str, seconds: float, said: str) -> None:
        """Take the end of a step."""
        with self._lock:
            self.found.setdefault(step, {}).update(code=code, seconds=round(seconds, 1))
            self._write()
            with (self.folder / "gpu.log").open("a") as log:
                log.write(f"==== {step}: {code} after {seconds:.1f} s\n{said}\n")
        print(f"{step}: {code} after {seconds:.1f} s", flush=True)
        if code != 0:
            print(said[-_LAST_CHARACTERS:], flush=True)

    def _write(self) -> None:
        (self.folder / "gpu.json").write_text(json.dumps(self.found, indent=1) + "\n")


_LIVING: list[subprocess.Popen[str]] = []


def _end(*_: object) -> None:
    """End all steps at once, and this process."""
    for process in _LIVING:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(143)


def perform(step: Step, options: list[str], report: Report) -> None:
    """Run a step to its end, or to its time limit."""
    words = list(step.arguments)
    if words[0] != "-m":
        words = ["-m", f"benchmarks.gpu.{words[0]}", *words[1:], *options]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    _LIVING.append(process)
    said: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            report.take(step.name, line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code: int | str
    try:
        code = process.wait(step.limit_s)
    except subprocess.TimeoutExpired:
        code = "out of time"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(timeout=5)
    report.end(step.name, code, time.monotonic() - began, "".join(said))


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--tiny", is_flag=True, help="The smallest sizes: does it still run?")
@click.option("--only", multiple=True, help="Steps; all by default.")
@click.option("--data", type=click.Path(path_type=Path), help="A folder with cifar10.parquet.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu-out"))
def main(device: str, tiny: bool, only: tuple[str, ...], data: Path | None, out: Path) -> None:
    """Run the steps; print each one's end."""
    signal.signal(signal.SIGTERM, _end)
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out.resolve())
    options = ["--device", device, *(["--tiny"] if tiny else [])]
    wanted = [step for step in steps(tiny) if not only or step.name in only]
    for group in sorted({step.group for step in wanted}):
        threads = []
        for step in wanted:
            if step.group != group:
                continue
            more = ["--data", str(data)] if step.name.startswith(("learn", "moco")) else []
            if group == ALONE:
                perform(step, options + more, report)
                continue
            thread = threading.Thread(target=perform, args=(step, options + more, report))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
