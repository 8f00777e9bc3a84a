"""Where a step's time goes, and how much memory a party takes: ``python -m benchmarks.gpu.copies``.

The passive party ``p1`` of a run over gRPC is profiled by torch: seconds of kernels, of copies each
way, and of copies that lie beside a kernel. At its end it compares the peak that it reported with
what torch and the driver say.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.gpu.tell import device_option, tell, tiny_option
from tests.harness.federation import Federation
from vfl_common.process.program import run_for_status
from vfl_party.cli import cli

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "B = 1024, 1024 wide, 2 in flight": (1024, 1024, {"in_flight": 2}),
    "B = 1024, 1024 wide": (1024, 1024, {}),
    "B = 256, 64 wide": (256, 64, {}),
}
_ASK = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
Spans = list[tuple[int, int]]


def recipe(batch: int, embedding: int, phase: dict[str, Any], epochs: int) -> dict[str, Any]:
    return {
        "name": "copies",
        "task": {"kind": "binary"},
        "rows": {"validation": 0.0, "test": 0.0},
        "parties": [
            {"name": "p0", "role": "active", "features": False},
            {"name": "p1", "role": "passive"},
        ],
        "model": {"embedding_size": embedding, "encoder": {"kind": "resnet18"}},
        "phases": [
            {
                "kind": "splitnn",
                "epochs": epochs,
                "batch_size": batch,
                "optimizer": {"kind": "sgd", "lr": 0.01},
            }
            | phase
        ],
    }


def run(case: str, device: str, tiny: bool) -> None:
    batch, embedding, phase = CASES[case]
    batch = 16 if tiny else batch
    rows = batch * (2 if tiny else 10)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        labels = np.arange(rows) % 2
        np.savez(folder / "p0.npz", x=np.zeros((rows, 1), np.float32), y=labels)
        images = random.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / "p1.npz", x=images)
        data = {
            "p0": {"source": "p0.npz", "label": "y", "columns": []},
            "p1": {"source": "p1.npz"},
        }
        tables = recipe(batch, embedding, phase, 1 if tiny else 4)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4"}
        with Federation(folder, tables, data, fresh=True) as federation:
            federation.start_server()
            federation.start_party("p0", "--device", device)
            federation.write_party("p1")
            words = ("-m", "benchmarks.gpu.copies", "--party", "p1.toml", "--device", device)
            federation.start("p1", "python", *words, environment=environment)
            summary = federation.finish(80)
        profile = json.loads((folder / "profile.json").read_text())
        party = next(each for each in summary["parties"] if each["name"] == "p1")
        tell(
            "copies",
            case=case,
            batch=batch,
            steps=party["times"][0]["steps"],
            times=party["times"],
            reported_peak_bytes=party["peak_memory_bytes"],
            **profile,
        )


def act(file: str, device: str) -> int:
    """Be the party, under the profiler; write ``profile.json``."""
    words = ["run", file, "--device", device]
    cuda = device != "cpu"
    activities = [
        torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    ]
    with torch.profiler.profile(activities=activities) as profiler:
        code = run_for_status(lambda: cli.main(words, prog_name="vfl-party", standalone_mode=False))
        found = memory() if cuda else {}
    found |= spent(profiler) if cuda else {}
    Path("profile.json").write_text(json.dumps(found))
    return code


def memory() -> dict[str, Any]:
    """Return what torch and the driver say of this process's memory, in bytes."""
    free, total = torch.cuda.mem_get_info()
    done = subprocess.run(
        [shutil.which("nvidia-smi") or "nvidia-smi", *_ASK],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    stats = torch.cuda.memory_stats()
    return {
        "pid": os.getpid(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_requested": stats.get("requested_bytes.all.peak"),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "whole_gpu_used": total - free,
        "driver": done.stdout.strip().splitlines(),
    }


def spent(profiler: torch.profiler.profile) -> dict[str, Any]:
    """Return milliseconds of the last half of the run on the GPU."""
    events = [
        (
            each.name(),
            each.start_ns(),
            each.start_ns() + each.duration_ns(),
            each.device_resource_id(),
        )
        for each in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if each.device_type() == torch.autograd.DeviceType.CUDA
        and each.duration_ns() > 0
        and "gpu_user_annotation" not in each.name()
    ]
    first, last = min(each[1] for each in events), max(each[2] for each in events)
    middle = first + (last - first) // 2
    late = [each for each in events if each[1] >= middle]

    def spans(*words: str) -> Spans:
        return joined([(b, e) for name, b, e, _ in late if any(word in name for word in words)])

    def rest() -> Spans:
        return joined(
            [(b, e) for name, b, e, _ in late if not name.startswith(("Memcpy", "Memset"))]
        )

    to, back, kernels = spans("Memcpy HtoD"), spans("Memcpy DtoH"), rest()
    names: dict[str, list[float]] = {}
    for name, begin, end, _ in late:
        if name.startswith("Memcpy"):
            found = names.setdefault(name, [0, 0.0])
            found[0] += 1
            found[1] += (end - begin) / 1e6
    return {
        "span_ms": (last - middle) / 1e6,
        "kernels_ms": length(kernels) / 1e6,
        "to_gpu_ms": length(to) / 1e6,
        "from_gpu_ms": length(back) / 1e6,
        "to_gpu_beside_kernels_ms": length(both(to, kernels)) / 1e6,
        "from_gpu_beside_kernels_ms": length(both(back, kernels)) / 1e6,
        "copies": names,
        "streams": len({each[3] for each in late}),
    }


def joined(spans: Spans) -> Spans:
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def both(one: Spans, other: Spans) -> Spans:
    found, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        begin, end = max(one[a][0], other[b][0]), min(one[a][1], other[b][1])
        if begin < end:
            found.append((begin, end))
        if one[a][1] < other[b][1]:
            a += 1
        else:
            b += 1
    return found


def length(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


@click.command()
@device_option
@tiny_option
@click.option("--case", "wanted", multiple=True, type=click.Choice([*CASES]))
@click.option("--party", help="Be this party.")
def main(device: str, tiny: bool, wanted: tuple[str, ...], party: str | None) -> None:
    """Profile each case."""
    if party is not None:
        sys.exit(act(party, device))
    for case in [*CASES][:1] if tiny else wanted or CASES:
        try:
            run(case, device, tiny)
        except Exception as error:  # noqa: BLE001 - the others are measured still
            tell("failed", case=case, why=str(error)[-2000:])


if __name__ == "__main__":
    main()
