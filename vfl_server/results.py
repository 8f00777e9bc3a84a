"""Makes the summary of a complete run from the parties' reports and the server's counts."""

from __future__ import annotations

import os

from vfl_common.bundle import CONTROL, Entry, Ledger, TcpCount
from vfl_common.config.recipe import Recipe
from vfl_common.process.logs import version
from vfl_common.psi import PHASE
from vfl_common.rpc.counters import TcpMeter
from vfl_common.run_folder import RunFolder
from vfl_common.stages import Job
from vfl_common.summary import PartySummary, Summary, gather_bytes
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.reports import (
    absences_of,
    exchanges_of,
    interfaces_of,
    ledger_of,
    metrics_of,
    privacy_of,
    worth_of,
)


def summarise(
    recipe: Recipe,
    job: Job,
    coordinator: Coordinator,
    folder: RunFolder,
    ledger: Ledger,
    meter: TcpMeter,
) -> Summary:
    """Returns the summary of a run that the coordinator has completed.

    ``folder``: The server's folder for the run. ``ledger``, ``meter``: The server's own ledger and
    byte counter.
    """
    ledgers: dict[str, list[Entry]] = {}
    kernel: dict[str, list[TcpCount]] = {recipe.server: meter.counts()}
    machines = {recipe.server: meter.interfaces()}
    reports = coordinator.reports
    for name, report in reports.items():
        ledgers[name], kernel[name] = ledger_of(report)
        machines[name] = interfaces_of(report)
    # The server's count of session bytes is complete. A party's count lacks the party's own report.
    for name in ledgers:
        ledgers[name] = [
            entry
            for entry in ledgers[name]
            if (entry.peer, entry.phase) != (recipe.server, CONTROL)
        ]
    active = reports[recipe.active.name]
    return Summary(
        run_id=folder.run_id,
        name=recipe.name,
        job=job,
        method=recipe.method,
        preset=recipe.preset if active.follows_preset else "",
        seed=recipe.seed,
        recipe_digest=recipe.digest(),
        metrics=metrics_of(active) or {},
        bytes=gather_bytes(
            {**ledgers, recipe.server: ledger.entries()},
            kernel,
            server=recipe.server,
            phases=[PHASE, "open", *(phase.name for phase in recipe.phases)],
            interfaces=machines,
        ),
        parties=[
            PartySummary(
                name=recipe.server, role="server", pid=os.getpid(), device="cpu", version=version()
            ),
            *coordinator.parties(),
        ],
        steps=active.steps,
        wall_s=round(coordinator.status().wall_s, 3),
        interruptions=coordinator.generation - 1,
        server_restarts=max(0, count_starts(folder) - 1),
        privacy=privacy_of(active),
        worth=worth_of(active),
        exchanges=exchanges_of(active) or [],
        absences=[row for row in absences_of(active) or [] if recipe.party(row.party) is not None],
        without=[name for name in active.without if recipe.party(name) is not None],
    )


def count_starts(folder: RunFolder) -> int:
    """Returns the number of server processes that have served this run. It includes this process
    once the process has opened the folder.
    """
    return int(folder.facts().get("server_starts", 0))
