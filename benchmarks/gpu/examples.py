"""Run examples with every party on the device: ``python -m benchmarks.gpu.examples``.

``vfl demo``'s recipe and ``examples/own-files`` are processes over gRPC. The others, one of each
method, are runs in one process.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.tell import device_option, tell, tiny_option
from benchmarks.ours import VFL
from vfl.simulation.federation import to_toml

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("digits.toml", "own-files/recipe.toml")
IN_ONE = (
    "breast-cancer.toml",
    "diabetes.toml",
    "fedonce/breast-cancer.toml",
    "fedonce/breast-cancer-l1.toml",
    "fedonce/diabetes.toml",
    "fedcvt-breast-cancer.toml",
    "fedcvt-digits.toml",
    "secureboost-breast-cancer.toml",
    "mocosfl/digits.toml",
    "ssl/fedhssl-moco.toml",
    "ssl/fedhssl-byol.toml",
    "ssl/fedhssl-star-simsiam.toml",
    "ssl/fedlocal-pma-simsiam.toml",
    "ssl/ssvfl-c-moco.toml",
    "ssl/ssvfl-i-simclr.toml",
)
IN_PROCESS = "import sys, vfl; print(vfl.simulate(sys.argv[1], out=sys.argv[2], quiet=True).folder)"
_LIMIT_S = 100.0


def write(example: str, device: str, folder: Path) -> Path:
    """Write the example with devices, beside copies of nothing: its files keep their places."""
    source = ROOT / "examples" / example
    tables: dict[str, Any] = tomllib.loads(source.read_text())
    names = [party["name"] for party in tables["parties"]]
    simulate = tables.setdefault("simulate", {})
    simulate["devices"] = dict.fromkeys(names, device)
    for each in (*simulate.get("parties", {}).values(), simulate.get("data", {})):
        if "source" in each and ":" not in each["source"]:
            each["source"] = str(source.parent / each["source"])
    path = folder / "recipe.toml"
    path.write_text(to_toml(tables))
    return path


def run(example: str, device: str) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, runs = write(example, device, folder), folder / "runs"
        words = [sys.executable, "-c", IN_PROCESS, str(recipe), str(runs)]
        if example in PROCESSES:
            words = [str(VFL), "simulate", str(recipe), "--out", str(runs), "--json"]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        facts: dict[str, Any] = {"example": example, "code": done.returncode}
        facts["seconds"] = round(time.monotonic() - began, 1)
        summaries = [*runs.glob("*/summary.json")]
        if summaries:
            summary = json.loads(summaries[0].read_bytes())
            facts["metrics"] = summary["metrics"]
            kept = ("name", "device", "device_name", "peak_memory_bytes")
            facts["parties"] = [{key: each.get(key) for key in kept} for each in summary["parties"]]
        if done.returncode:
            facts["why"] = done.stderr[-2500:]
        tell("example", **facts)


@click.command()
@device_option
@tiny_option
def main(device: str, tiny: bool) -> None:
    """Run them, several at a time."""
    wanted = PROCESSES[1:] + IN_ONE[-1:] if tiny else PROCESSES + IN_ONE
    with concurrent.futures.ThreadPoolExecutor(2 if tiny else 6) as pool:
        for each in [pool.submit(run, example, device) for example in wanted]:
            try:
                each.result()
            except Exception as error:  # noqa: BLE001 - the others are told still
                tell("failed", why=str(error)[-1500:])


if __name__ == "__main__":
    main()
