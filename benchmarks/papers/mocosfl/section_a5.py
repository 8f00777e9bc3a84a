"""MocoSFL, appendix A.5: what is sent, by the paper's formula and as counted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import vfl
from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table, Tables, resolved
from benchmarks.papers.mocosfl.common import CIFAR10, PROBE, SMALL, pretraining
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import build_bottom, build_halves

_FORMULA, _COUNTED = "formula, MB", "counted, MB"


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for cut in (1, 3):
        found = work.once(f"cut {cut}", lambda cut=cut: _bytes(work, cut))  # type: ignore[misc]
        for column in (_FORMULA, _COUNTED):
            yield (CIFAR10.name, f"MocoSFL-{cut}", column), [found[column]]


def _bytes(work: Work, cut: int) -> dict[str, float]:
    """Returns the MB of one epoch, of all clients."""
    tables = work.recipe(CIFAR10, Column("5 clients", prepare={"deal": "even"}))
    phase: Tables = resolved(pretraining(cut), work.scale) | {"epochs": 1, "auto_adjust": False}
    recipe = vfl.Recipe.from_dict({**tables, "phases": [phase, resolved(PROBE, work.scale)]})
    settings = MocoSFLSettings.model_validate({k: v for k, v in phase.items() if k != "kind"})
    run = vfl.simulate(recipe, quiet=True)
    latent = 4 * math.prod(build_halves(recipe.settings, settings).latent)
    weights = 4 * sum(e.numel() for e in build_bottom(recipe.settings, settings).parameters())
    clients = len(recipe.settings.passives)
    times = [each for party in run.summary.parties for each in party.times]
    steps = max(each.steps for each in times if each.phase == "mocosfl")
    rows = steps * settings.batch_size * clients
    paper = 2 * latent * rows + weights * settings.averages_per_epoch * clients
    counted = run.summary.bytes.by_phase["mocosfl"].payload_bytes
    return {_FORMULA: paper / 1e6, _COUNTED: counted / 1e6}


TABLE = Table(
    place="Appendix A.5",
    title="bytes of an epoch, by the paper's formula and as counted",
    data=(CIFAR10,),
    lines=(Line("MocoSFL-1"), Line("MocoSFL-3")),
    columns=(Column(_FORMULA, lower=True), Column(_COUNTED, lower=True)),
    figures={},
    source="appendix A.5, a formula; the numbers of the main part's tables are not at hand",
    claims=(),
    ours=True,
    seeds=(1,),
    small=SMALL + "; one epoch of 5 clients",
    notes=(
        "two latents of an image travel, that of the moving average too, and each average comes "
        "back: 1.5 times the formula or more",
        "FLOPs and memory of a client are what `vfl forecast` shows",
    ),
    digits=1,
    compute=compute,
)
