"""Makes the runs of a rehearsal and plays attacks on them, in this process or in another one, which
returns its findings in a file.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vfl.jobs import WorkerPool
from vfl.library.plugins import get_import_paths, import_plugins
from vfl.library.recipe import Recipe
from vfl.library.run import Run
from vfl.library.simulate import Order, carry_out, clear_folder, in_process
from vfl_common.config.base import parse
from vfl_common.config.party import Init
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.config.recipe import divide
from vfl_leaks.rehearsal import Played, Rehearsal
from vfl_leaks.scene import Figure, Shown
from vfl_leaks.wiretap import MessageSizes, Times
from vfl_party.assembly.trial import modules_of
from vfl_party.base.plugins import use_plugins

MAKES = "vfl_leaks.orders:make"
# The temporary file with the findings in the run's folder.
_FILE = "rehearsal.json"


def make_in_pool(
    workers: WorkerPool, recipe: Recipe, data: Any, out: Path, request: AttackRequest
) -> SeedResult:
    """Makes a run and plays the attacks in a worker process, which calls the function ``MAKES``.

    The arguments after ``workers`` are those of ``make_here``. Raises VflError.
    """

    def send(order: Order) -> None:
        workers.run(
            {
                "recipe": order.in_files("jobs=1"),
                "base": str(order.base.resolve()),
                "folder": str(order.folder.resolve()),
                "plugins": get_import_paths("jobs=1"),
                "asked": asdict(request),
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
    request, threads_before = AttackRequest(**order["asked"]), torch.get_num_threads()
    torch.set_num_threads(order["threads"])
    try:
        with use_plugins(import_plugins(order["plugins"])):
            settings = parse(Settings, order["recipe"], "recipe")
            arguments = settings, divide(settings, base), base, folder
            findings = play_on(
                Order(order["recipe"], *arguments, order["recipe"], None, {}), request
            )
    finally:
        torch.set_num_threads(threads_before)
    (folder / _FILE).write_text(json.dumps(to_plain(findings)))


def to_plain(findings: Findings) -> list[list[Any]]:
    """Returns the findings as values for JSON, from which ``read`` restores them exactly."""
    return [
        [
            item if isinstance(item, str) else asdict(item, dict_factory=_fields_to_plain)
            for item in items
        ]
        for items in findings
    ]


def _fields_to_plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Turns tensors into lists. Numbers in JSON represent float32 exactly."""
    return {
        name: [(title, images.tolist()) for title, images in value] if name == "rows" else value
        for name, value in fields
    }


def read(content: list[list[Any]]) -> Findings:
    """Restores the findings from the values that ``to_plain`` returned."""
    played, sizes, times, gaps = content
    return (
        [
            Played(**line | {"figures": tuple(map(_read_figure, line["figures"]))})
            for line in played
        ],
        tuple(MessageSizes(**line | {"sizes": _to_pairs(line["sizes"])}) for line in sizes),
        tuple(Times(**line) for line in times),
        tuple(gaps),
    )


def _read_figure(fields: dict[str, Any]) -> Figure:
    images_shown = fields["shown"]
    if images_shown is not None:
        rows = tuple((name, torch.tensor(images)) for name, images in images_shown["rows"])
        images_shown = Shown(images_shown["party"], rows, images_shown["says"])
    return Figure(**fields | {"shown": images_shown})


def _to_pairs(pairs: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((size, number) for size, number in pairs)


Findings = tuple[list[Played], tuple[MessageSizes, ...], tuple[Times, ...], tuple[str, ...]]


@dataclass(frozen=True)
class AttackRequest:
    """The names of the attacks to play, and the settings of the recording."""

    attacks: Sequence[str]
    every: int
    init: Init


@dataclass(frozen=True)
class SeedResult:
    """The result of one run with one seed; see ``Rehearsed``."""

    run: Run
    played: list[Played]
    sizes: tuple[MessageSizes, ...]
    times: tuple[Times, ...]
    gaps: tuple[str, ...]


def make_here(
    recipe: Recipe,
    data: Mapping[str, Any],
    out: Path,
    request: AttackRequest,
    *,
    quiet: bool,
    tell: Callable[[str], None],
) -> SeedResult:
    """Makes a run in this process and plays the attacks on it.

    Args:
        recipe: the recipe; its seed is also the seed of the attacks.
        data: as in ``simulate``.
        out: the folder of runs.
        request: the attacks to play, and the settings of the recording.
        quiet: whether to show no progress.
        tell: called with a sentence before each attack.

    Raises VflError.
    """
    findings: list[Findings] = []

    def execute(order: Order) -> None:
        findings.append(play_on(order, request, quiet=quiet, tell=tell))

    run = carry_out(recipe, data, execute, baseline=None, out=out)
    return SeedResult(run, *findings[0])


def play_on(
    order: Order,
    request: AttackRequest,
    *,
    quiet: bool = True,
    tell: Callable[[str], None] = lambda _text: None,
) -> Findings:
    """Makes the run of an order in this process and plays attacks on it. Raises VflError."""
    with tempfile.TemporaryDirectory(prefix="vfl-record-") as folder:
        rehearsal = Rehearsal(Path(folder), request.every)
        secrets = _secrets(order) if request.init == "secret" else None
        in_process(quiet, None, order, attach=rehearsal.attach, secrets=secrets)
        # Attacks build encoders from the modules that the recipe names.
        with modules_of(order.base):
            played = rehearsal.play(request.attacks, order.settings.seed, tell=tell)
        gaps = (*rehearsal.list_gaps(), *rehearsal.unknown(request.attacks))
        return played, tuple(rehearsal.sizes()), tuple(rehearsal.times()), gaps


def _secrets(order: Order) -> dict[str, bytes]:
    """Returns {party: a secret unknown to attacks}, the same in each rehearsal of a recipe and
    seed.
    """
    settings = order.settings
    names = [party.name for party in settings.parties]
    return {
        name: hashlib.sha256(f"rehearsal {settings.seed} {name}".encode()).digest()
        for name in names
    }
