"""Runs rehearsals in other processes, which return their findings as a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vfl.jobs.pool import WorkerPool
from vfl.leak_meter.part import AttackRequest, Findings, SeedResult, play_on
from vfl.leak_meter.rehearsal import Played
from vfl.leak_meter.scene.scene import Figure, Shown
from vfl.leak_meter.wiretap.sizes import MessageSizes
from vfl.leak_meter.wiretap.times import Times
from vfl.library.orders import clear_folder
from vfl.library.plugins import get_import_paths, import_plugins
from vfl.library.recipe import Recipe
from vfl.library.simulate import Order, carry_out
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe as Settings
from vfl_party.base.plugins import use_plugins

MAKES = "vfl.leak_meter.orders:make"
# The file in the run's folder with the findings, until they are read.
_FILE = "rehearsal.json"


def make_in_pool(
    workers: WorkerPool, recipe: Recipe, data: Any, out: Path, asked: AttackRequest
) -> SeedResult:
    """Makes a run and plays the attacks in a process of ``workers``, which executes ``MAKES``.

    The other arguments are those of ``make_here``. Raises VflError.
    """

    def send(order: Order) -> None:
        workers.run(
            {
                "recipe": order.in_files("jobs=1"),
                "base": str(order.base.resolve()),
                "folder": str(order.folder.resolve()),
                "plugins": get_import_paths("jobs=1"),
                "asked": asdict(asked),
                # The result of an attack may depend on the number of threads.
                "threads": torch.get_num_threads(),
            }
        )

    run = carry_out(recipe, data, send, baseline=None, out=out)
    path = run.folder / _FILE
    findings = read(json.loads(path.read_bytes()))
    path.unlink()
    return SeedResult(run, *findings)


def make(order: dict[str, Any]) -> None:
    """Makes a run in this process and plays the attacks. Raises the error of the run."""
    folder, base = clear_folder(order["folder"]), Path(order["base"])
    asked, before = AttackRequest(**order["asked"]), torch.get_num_threads()
    torch.set_num_threads(order["threads"])
    try:
        with use_plugins(import_plugins(order["plugins"])):
            settings = parse(Settings, order["recipe"], "recipe")
            parts = settings, divide(settings, base), base, folder
            findings = play_on(Order(order["recipe"], *parts, order["recipe"], None, {}), asked)
    finally:
        torch.set_num_threads(before)
    (folder / _FILE).write_text(json.dumps(plain(findings)))


def plain(findings: Findings) -> list[list[Any]]:
    """Returns the findings as values for JSON, without loss."""
    return [
        [
            item if isinstance(item, str) else asdict(item, dict_factory=_plain_fields)
            for item in part
        ]
        for part in findings
    ]


def _plain_fields(named: list[tuple[str, Any]]) -> dict[str, Any]:
    """Turns tensors into lists; numbers in JSON represent float32 exactly."""
    return {
        name: [(of, images.tolist()) for of, images in value] if name == "rows" else value
        for name, value in named
    }


def read(content: list[list[Any]]) -> Findings:
    """Returns the findings from the values that ``plain`` returned."""
    played, sizes, times, gaps = content
    return (
        [Played(**line | {"figures": tuple(map(_figure, line["figures"]))}) for line in played],
        tuple(MessageSizes(**line | {"sizes": _pairs(line["sizes"])}) for line in sizes),
        tuple(Times(**line) for line in times),
        tuple(gaps),
    )


def _figure(fields: dict[str, Any]) -> Figure:
    drawn = fields["shown"]
    if drawn is not None:
        rows = tuple((name, torch.tensor(images)) for name, images in drawn["rows"])
        drawn = Shown(drawn["party"], rows, drawn["says"])
    return Figure(**fields | {"shown": drawn})


def _pairs(pairs: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((size, number) for size, number in pairs)
