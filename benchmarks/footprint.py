"""Measures what the programs cost: seconds and memory of ``vfl-party --help`` and of a running
party.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.ours import VFL, write_recipe
from benchmarks.task import Task

HELP = [str(Path(sys.executable).with_name("vfl-party")), "--help"]
RUN_S = 120.0


def measure(workdir: Path, repeats: int) -> dict[str, Any]:
    """Measures ``--help`` and a small ``mlp`` federation.

    Returns seconds (median) and peak MiB of ``--help``; peak MiB of the federation's parties,
    seconds from their start until training begins, and whether any of them has loaded torchvision.
    """
    helps = [_help() for _ in range(max(1, repeats))]
    return {
        "help_s": median(seconds for seconds, _ in helps),
        "help_mib": median(mib for _, mib in helps),
        **_running(workdir),
    }


def _help() -> tuple[float, float]:
    """Returns seconds and peak MiB of one ``vfl-party --help``.

    A small interpreter measures: a child's peak counts what its parent held when it was forked, and
    this process holds all of torch.
    """
    out = subprocess.run(
        [sys.executable, "-S", "-c", _HELP, *HELP], check=True, capture_output=True, text=True
    ).stdout
    seconds, kib = out.splitlines()[-1].split()
    return float(seconds), int(kib) / 1024


_HELP = """
import resource, subprocess, sys, time
began_s = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def _running(workdir: Path) -> dict[str, Any]:
    task = Task("footprint", parties=2, batch=256, embedding=64, steps=2000)
    recipe = write_recipe(task, workdir)
    command = [str(VFL), "simulate", str(recipe), "--out", str(workdir / "runs"), "--json"]
    peaks: dict[int, float] = {}
    torchvision = False
    with (workdir / "stdout").open("w+") as out, (workdir / "stderr").open("w") as errors:
        began_s = time.perf_counter()
        # Each process imports for itself, as on separate machines.
        own = os.environ | {"VFL_NO_FORK": "1"}
        launcher = psutil.Popen(command, stdout=out, stderr=errors, env=own)
        while launcher.poll() is None and time.perf_counter() - began_s < RUN_S:
            for child in launcher.children():
                try:
                    peaks[child.pid] = max(
                        peaks.get(child.pid, 0.0), child.memory_info().rss / 2**20
                    )
                    torchvision |= any(
                        "torchvision" in region.path for region in child.memory_maps()
                    )
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            time.sleep(0.25)
        if launcher.poll() is None:
            launcher.terminate()
        status, total_s = launcher.wait(timeout=30), time.perf_counter() - began_s
        if status != 0:
            raise RuntimeError((workdir / "stderr").read_text()[-2000:])
        out.seek(0)
        summary = json.loads(out.read().splitlines()[-1])
    named = {party["name"]: peaks.get(party["pid"], 0.0) for party in summary["parties"]}
    return {
        "server_mib": named["server"],
        "active_mib": named["active"],
        "passive_mib": named["passive0"],
        "start_and_end_s": total_s - summary["wall_s"],
        "torchvision_loaded": torchvision,
    }
