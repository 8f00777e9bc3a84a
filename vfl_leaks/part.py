"""Makes one run of a rehearsal and plays the attacks on it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.library.recipe import Recipe
from vfl.library.run import Run
from vfl.library.simulate import Order, carry_out, in_process
from vfl_common.config.party import Init
from vfl_leaks.rehearsal import Played, Rehearsal
from vfl_leaks.wiretap.sizes import MessageSizes
from vfl_leaks.wiretap.times import Times
from vfl_party.assembly.trial import modules_of

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
