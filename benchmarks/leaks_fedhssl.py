"""FedHSSL's Tables VI and VII on MNIST-10k in quadrants: ``python -m benchmarks.leaks --only
fedhssl --data DIR``.

Four parties with a small CNN each; 20 % of the rows are aligned and 200 are labelled, as in the
paper. The attacker is the first passive party: it knows 80 labels. Table VI attacks its encoder
after pretraining, in which the active party adds ISO (Eq. 7) of λp to its projections and to its
shared top. Table VII attacks it after fine-tuning, in which the active party adds ISO of λf to its
gradients; CAP is the mean over λf of main × (1 − recovered) (Eq. 8).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import vfl
from benchmarks.ssl import CROSS, DIGITS, SPLIT, mnist
from benchmarks.studies import EVALUATE, Tables
from vfl_common.text import to_json
from vfl_leaks.attacks import completion
from vfl_leaks.rehearsal import Rehearsal, rehearse
from vfl_leaks.result import Spread
from vfl_leaks.scene import Scene

RESULTS = Path(__file__).parent / "results" / "leaks-fedhssl"
LABELLED, ALIGNED = 200, 0.2
# The paper's party 2; it has the upper right quadrant.
ATTACKER = "passive1"
# λf of Table VII.
LAMBDAS = (1.0, 5.0, 25.0)
# λp of FedHSSL in Table VII, as of three of the paper's four data sets.
PAPER = 0.1
LAMBDAS_P = (0.0, PAPER, *LAMBDAS)
# With λf = 25, SGD without clipping diverges. Chosen on the validation rows of seed 11 among 1,
# 0.1, and Adam.
FINE: Tables = SPLIT | {"optimizer": SPLIT["optimizer"] | {"clip_norm": 1.0}}
# Rounds: messages are not attacked, so only the first round is recorded.
NEVER = 10**6
PAPER_CAP = (
    ("NUSWIDE", 0.264, 0.258, 0.284),
    ("Avazu", 0.238, 0.262, 0.262),
    ("BHI", 0.242, 0.221, 0.246),
    ("ModelNet", 0.342, 0.334, 0.348),
)


@dataclass(frozen=True)
class Group:
    """Runs that share one pretraining. ``lambdas``: λf of the fine-tuning runs; ``lambda_p``: of
    the pretraining.
    """

    method: str
    pretrain: Tables | None
    lambdas: tuple[float, ...]
    lambda_p: float = 0.0


@dataclass(frozen=True)
class Attacked:
    """One run and what was recovered. ``lambda_f``: None after pretraining alone, which has no
    ``main`` accuracy.

    ``recovered``: {attack: accuracy}; ``without``: the same of the baselines.
    """

    seed: int
    method: str
    lambda_p: float
    lambda_f: float | None
    main: float | None
    recovered: dict[str, float]
    without: dict[str, float]


def groups() -> list[Group]:
    """Returns the lines of both tables."""
    ssl: Tables = {"kind": "fedhssl", "ssl": "simsiam", **DIGITS}
    local = ssl | {"cross": False, "aggregate": False}
    hssl = ssl | {"cross_epochs": CROSS["simsiam"].epochs, "gamma": CROSS["simsiam"].gamma}
    noisy = [
        Group(
            "FedHSSL",
            hssl | {"iso_embedding": x, "iso_weights": x},
            (0.0, *LAMBDAS) if x == PAPER else (0.0,),
            x,
        )
        for x in LAMBDAS_P
    ]
    return [
        Group("SplitNN", None, (0.0, *LAMBDAS)),
        Group("FedLocal", local, (0.0, *LAMBDAS)),
        *noisy,
    ]


def run(data: Path, seeds: Sequence[int], *, quick: bool, console: Console) -> None:
    """Runs what the results do not have yet, and writes them after each group of runs."""
    done = [] if quick else read()
    beside = {each.seed: each.without for each in done}
    for seed in seeds:
        for group in _quick() if quick else groups():
            key = (seed, group.method, group.lambda_p)
            if key in {(each.seed, each.method, each.lambda_p) for each in done}:
                continue
            for each in attacked(data, group, seed, beside):
                done.append(each)
                best = max(each.recovered.values())
                text = (
                    f"seed {seed}, {each.method}, λp {each.lambda_p:g}, λf {each.lambda_f}: "
                    f"main {each.main}"
                )
                console.print(f"{text}, recovered {best:.3f}")
            if not quick:
                RESULTS.with_suffix(".json").write_text(
                    to_json({"runs": [asdict(each) for each in done]}) + "\n"
                )
                RESULTS.with_suffix(".md").write_text(written(done))
    console.print(written(done), markup=False)


# {seed: the baselines}, which no run changes.
Beside = dict[int, dict[str, float]]


def attacked(data: Path, group: Group, seed: int, beside: Beside) -> Iterator[Attacked]:
    """Yields a group's runs: after pretraining, and after fine-tuning with each λf."""
    start: Tables = {}
    base = mnist(ALIGNED)(data.resolve(), data) | {"name": "leaks-fedhssl", "seed": seed}
    with tempfile.TemporaryDirectory(prefix="vfl-") as place:
        if group.pretrain is not None:
            tables = base | {"phases": [group.pretrain]}
            yield _attacked(tables, Path(place), group, seed, None, beside)
            (folder,) = Path(place).iterdir()
            start = {"start": {"run": folder.name, "phases": [group.pretrain]}}
        labelled = {"rows": base["rows"] | {"labelled": LABELLED}}
        for lambda_f in group.lambdas:
            tables = base | start | labelled | {"phases": [FINE | {"iso": lambda_f}, EVALUATE]}
            yield _attacked(tables, Path(place), group, seed, lambda_f, beside)


def _attacked(
    tables: Tables, place: Path, group: Group, seed: int, lambda_f: float | None, beside: Beside
) -> Attacked:
    with tempfile.TemporaryDirectory(prefix="vfl-record-") as record:
        rehearsal = Rehearsal(Path(record), NEVER)
        found = rehearse(vfl.Recipe.from_dict(tables), {}, place, rehearsal.attach, quiet=True)
        scene = rehearsal.scene(ATTACKER, seed)
        if seed not in beside:
            beside[seed] = _accuracies(scene, completion.compute_baselines(scene)) | {
                "majority": _majority(scene)
            }
        recovered = _accuracies(scene, completion.recover_labels(scene))
    main = None if lambda_f is None else found.metrics["test"]["accuracy"]
    return Attacked(seed, group.method, group.lambda_p, lambda_f, main, recovered, beside[seed])


def _accuracies(scene: Scene, found: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns {what the attacker does: its test accuracy}."""
    truth = scene.labels[scene.rows["test"]]
    return {name: completion.accuracy(logits, truth) for name, logits in found.items()}


def _majority(scene: Scene) -> float:
    """Returns the share of the most frequent class among the test rows."""
    truth = scene.labels[scene.rows["test"]]
    return float(torch.bincount(truth).max()) / len(truth)


def _quick() -> list[Group]:
    """Makes one group of one round of pretraining, to check that it runs."""
    group = next(each for each in groups() if each.lambda_p == PAPER)
    assert group.pretrain is not None
    return [Group(group.method, group.pretrain | {"rounds": 1}, (1.0,), group.lambda_p)]


def read() -> list[Attacked]:
    """Returns the runs that the results have."""
    path = RESULTS.with_suffix(".json")
    return (
        [Attacked(**each) for each in json.loads(path.read_text())["runs"]] if path.exists() else []
    )


def written(done: Sequence[Attacked]) -> str:
    """Returns both tables and the paper's figures, in Markdown."""
    kinds_of = list(dict.fromkeys(kind for each in done for kind in each.recovered))
    return "\n".join(
        [*_table_vi(done, kinds_of), "", *_table_vii(done, kinds_of), "", *_paper(), ""]
    )


def _table_vi(done: Sequence[Attacked], attacks: Sequence[str]) -> list[str]:
    """After pretraining: what each attack recovers, beside the main accuracy of fine-tuning without
    noise.
    """
    lines = [
        "**Table VI: after pretraining.** Test accuracy; the attacker has one quadrant of "
        "four. FedLocal's encoder "
        "is the paper's A_SimSiam.\n",
        "| encoder | λp | main | " + " | ".join(attacks) + " |",
        "| --- " * (3 + len(attacks)) + "|",
    ]
    keys = dict.fromkeys((each.method, each.lambda_p) for each in done if each.lambda_f is None)
    for method, lambda_p in keys:
        main = [each.main for each in _of(done, method, lambda_p, 0.0) if each.main is not None]
        cells = [_mean(_of(done, method, lambda_p, None), attack) for attack in attacks]
        lines.append(
            f"| {method} | {lambda_p:g} | {Spread.of(main) or ''} | "
            + " | ".join(map(str, cells))
            + " |"
        )
    names = list(dict.fromkeys(name for each in done for name in each.without))
    beside = ", ".join(
        f"{name} {_spread([each.without[name] for each in _first(done)])}" for name in names
    )
    return [*lines, f"\nWithout any message: {beside}."]


def _table_vii(done: Sequence[Attacked], attacks: Sequence[str]) -> list[str]:
    """After fine-tuning: main and recovered accuracy for each λf, and CAP by each attack."""
    lines = [
        "**Table VII: after fine-tuning**, main / recovered for each λf, and CAP over 1, 5, 25.\n",
        "| method | attack | λf = 0 | " + " | ".join(f"λf = {x:g}" for x in LAMBDAS) + " | CAP |",
        "| --- " * (4 + len(LAMBDAS)) + "|",
    ]
    for method, lambda_p in (("SplitNN", 0.0), ("FedLocal", 0.0), ("FedHSSL", PAPER)):
        for attack in attacks:
            cells: list[Any] = []
            for lambda_f in (0.0, *LAMBDAS):
                runs = _of(done, method, lambda_p, lambda_f)
                main = Spread.of(each.main for each in runs)
                cells.append(f"{main} / {_mean(runs, attack)}" if main is not None else "")
            cells.append(
                cap([run for x in LAMBDAS for run in _of(done, method, lambda_p, x)], attack) or ""
            )
            lines.append(f"| {method} | {attack} | " + " | ".join(map(str, cells)) + " |")
    return lines


def cap(runs: Sequence[Attacked], attack: str) -> Spread | None:
    """Returns CAP over the seeds that have all of λf; None if none has. ``runs``: of one method."""
    products: dict[int, list[float]] = {}
    for each in runs:
        if each.main is not None and each.lambda_f in LAMBDAS:
            products.setdefault(each.seed, []).append(each.main * (1 - each.recovered[attack]))
    return Spread.of(
        statistics.fmean(of_seed) for of_seed in products.values() if len(of_seed) == len(LAMBDAS)
    )


def _paper() -> list[str]:
    head = [
        "**The paper's Table VII** (CAP, its own data).\n",
        "| data | SplitNN | FedLocal | FedHSSL |",
        "| --- " * 4 + "|",
    ]
    return [
        *head,
        *(f"| {name} | {split} | {local} | {hssl} |" for name, split, local, hssl in PAPER_CAP),
    ]


def _of(
    done: Sequence[Attacked], method: str, lambda_p: float, lambda_f: float | None
) -> list[Attacked]:
    return [
        each
        for each in done
        if (each.method, each.lambda_p, each.lambda_f) == (method, lambda_p, lambda_f)
    ]


def _first(done: Sequence[Attacked]) -> list[Attacked]:
    """Returns one run of each seed: baselines do not depend on the run."""
    return [*{each.seed: each for each in done}.values()]


def _mean(runs: Sequence[Attacked], attack: str) -> str:
    return _spread([each.recovered[attack] for each in runs if attack in each.recovered])


def _spread(values: Sequence[float]) -> str:
    return str(Spread.of(values) or "")
