"""Model completion against FedHSSL with isotropic noise, for Tables VI, VII, XI and XII: a passive
party that knows 80 labels completes its encoder after pretraining, or after fine-tuning.

The attacker is the first passive party, the paper's party 2. Of the head alone, the head with the
encoder, and MixMatch, the attack that recovers most counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

import vfl
from benchmarks.papers.compute import Work
from benchmarks.papers.describe import EVALUATE, Column, Data, Tables, resolved
from benchmarks.papers.fedhssl.common import LOCAL, RATE, fine, pretrained
from vfl_leaks.attacks import completion
from vfl_leaks.rehearsal import Rehearsal, rehearse
from vfl_leaks.scene import Scene

LABELS = 200
# λf of Tables VII and XI.
LAMBDAS = (1.0, 5.0, 25.0)
SPLITNN, LOCAL_NAME, HYBRID = "FedSplitNN", "FedLocalSimSiam", "FedHSSL-SimSiam"
# Rounds: messages are not attacked, so only the first is recorded.
_NEVER = 10**6
NOTES = (
    RATE,
    "of three ways to complete the model, the one that recovers most counts",
    "gradients are clipped to norm 1 in fine-tuning, since it diverges with λf = 25",
)


def lambda_p(data: Data, aligned: float) -> float:
    """Returns the noise of pretraining in Table XI."""
    return (5.0 if aligned > 0.3 else 0.4) if data.name == "NUSWIDE" else 0.1


def attacked(
    work: Work, data: Data, method: str, seed: int, *, aligned: float = 0.2, iso: float = 0.0
) -> dict[str, float]:
    """Pretrains, attacks, fine-tunes with each λf and attacks again.

    ``iso``: λp. Returns ``recovered``, of the pretrained encoder; ``main λ`` and ``recovered λ``,
    after fine-tuning with λf = 0 and each of LAMBDAS.
    """
    shared = replace(work, folder=work.folder.parent / f"fedhssl-attack-{work.scale}")
    key = f"{data.name}, {method}, seed {seed}, {aligned:g} aligned, λp {iso:g}"
    return shared.once(key, lambda: _attacked(work, data, method, seed, aligned, iso))


def _attacked(
    work: Work, data: Data, method: str, seed: int, aligned: float, iso: float
) -> dict[str, float]:
    recipe = vfl.Recipe.from_dict(work.recipe(data, Column("attack")) | {"seed": seed})
    recipe = recipe.replace({**resolved(data.changes, work.scale), "rows.aligned": aligned})
    found: dict[str, float] = {}
    start: Tables = {}
    with tempfile.TemporaryDirectory(prefix="vfl-") as folder:
        if method != SPLITNN:
            switches: Tables = LOCAL
            if method == HYBRID:
                switches = {"iso_embedding": iso, "iso_weights": iso}
            phases = resolved(pretrained("simsiam", **switches)(data), work.scale)
            _, scene = _run(recipe.replace({"phases": phases}), folder, seed)
            truth = scene.labels[scene.rows["test"]]
            found["recovered"] = _most(completion.recover_labels(scene), truth)
            (run,) = Path(folder).iterdir()
            start = {"start": {"run": run.name, "phases": phases}}
        for strength in (0.0, *LAMBDAS):
            phase = resolved(fine(data), work.scale)[0]
            phase |= {"iso": strength, "optimizer": phase["optimizer"] | {"clip_norm": 1.0}}
            changes = {**start, "rows.labelled": LABELS, "phases": [phase, EVALUATE]}
            main, scene = _run(recipe.replace(changes), folder, seed)
            truth = scene.labels[scene.rows["test"]]
            found[f"main {strength:g}"] = main["test"][data.metric]
            found[f"recovered {strength:g}"] = _most(completion.recover_labels(scene), truth)
    return found


def _run(
    recipe: vfl.Recipe, folder: str, seed: int
) -> tuple[Mapping[str, Mapping[str, float]], Scene]:
    with tempfile.TemporaryDirectory(prefix="vfl-record-") as record:
        rehearsal = Rehearsal(Path(record), _NEVER)
        run = rehearse(recipe, {}, Path(folder), rehearsal.attach, quiet=True)
        attacker = recipe.settings.passives[0].name
        return run.metrics, rehearsal.scene(attacker, seed)


def _most(found: Mapping[str, Tensor], truth: Tensor) -> float:
    return max(completion.accuracy(logits, truth) for logits in found.values())


def cap(found: Mapping[str, float]) -> float:
    """Returns the calibrated averaged performance (Eq. 8)."""
    products = [found[f"main {x:g}"] * (1 - found[f"recovered {x:g}"]) for x in LAMBDAS]
    return sum(products) / len(products)
