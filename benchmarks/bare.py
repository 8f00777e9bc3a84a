"""Contestant ``bare``: the strongest honest split loop over gRPC that checks, counts and logs
nothing.

One active and K passive processes; raw bytes on one bidirectional stream a party; mutual TLS with
throwaway certificates. Its variants are ranked by ``python -m benchmarks.bare_variants``.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bare_wire import Wire
from benchmarks.certificates import write_certificates
from benchmarks.contest import Measurement, measurement
from benchmarks.processes import Processes
from benchmarks.task import Task

TIMEOUT_S = 600.0
PLAIN = Wire()
TUNED = Wire(
    environment={
        "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
        "GRPC_POLL_STRATEGY": "poll",
    }
)


def run(task: Task, workdir: Path, wire: Wire = PLAIN) -> Measurement:
    """Train ``task`` over ``wire`` in K + 1 fresh processes, timed by the active one."""
    certificates = workdir / "certificates"
    write_certificates(certificates, ["active", *(f"passive{k}" for k in range(task.parties))])
    spec = workdir / "spec.json"
    spec.write_text(
        json.dumps(
            {"task": task.to_json(), "wire": wire.to_json(), "certificates": str(certificates)}
        )
    )
    with Processes(workdir, TIMEOUT_S) as processes:
        processes.start(
            "active", "benchmarks.bare_active", [str(spec)], threads=1, environment=wire.environment
        )
        port = processes.expect("active", "ready")["port"]
        for k in range(task.parties):
            processes.start(
                f"passive{k}",
                "benchmarks.bare_passive",
                [str(spec), str(k), str(port)],
                threads=task.passive_threads,
                environment=wire.environment,
            )
        done = processes.expect("active", "done")
    return measurement(done)


def run_tuned(task: Task, workdir: Path) -> Measurement:
    """Train as `bare` does, with the poller of the real system (``vfl_common/rpc/__init__.py``)."""
    return run(task, workdir, TUNED)
