"""Self-supervised methods over real federations: ``python -m benchmarks.ssl TASK --data DIR``.

Each task is a study (``vfl study``): one recipe, every method, several seeds and numbers of
labelled rows; each run is K + 1 processes, the server among them, over gRPC with mutual TLS. Tables
and plots go to ``benchmarks/results/``. What was chosen (learning rates, rounds, gamma) was chosen
on validation rows of another seed than those reported.

    mnist    MNIST-10k in quadrants, four parties with a small CNN each, 40 % aligned
    uji2     UJIIndoorLoc, building and floor in 13 classes, access points split between two parties
    uji4     the same, four parties
    credit   default of credit cards, FATE's split between two organisations, AUC
    rounds   FedHSSL's e = 1, 4, 8 updates on one exchange (the paper's Fig. 7), on the
             MNIST task, 20 % aligned
    cvt-mnist, cvt-uji, cvt-credit
             FedCVT beside FedSplitNN and FedHSSL-MoCo, two parties, 40 % aligned: MNIST-10k in halves with
             a small CNN
             at each party, uji2's and credit's tables
    bytes    SS-VFL-I's one upload beside split training's bytes to the same accuracy, on the MNIST
             task
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks import studies
from benchmarks.studies import EVALUATE, Tables, sgd
from vfl_common.summary import load_summary
from vfl_lab.studies.report import FineTuned, compute_mean_and_sd, table

NAMES = {"simsiam": "SimSiam", "byol": "BYOL", "moco": "MoCo"}


@dataclass(frozen=True)
class Task:
    """A study: its recipe (made from the folder of data and a folder for the study's own files),
    and its lines.
    """

    recipe: Callable[[Path, Path], Tables]
    labels: tuple[int, ...]
    metric: str
    methods: list[Tables]
    finetune: list[Tables]


def recipe(parties: int, task: Tables, rows: Tables, model: Tables, simulate: Tables) -> Tables:
    return studies.recipe("ssl", parties, task, model, simulate, rows)


def mnist(aligned: float = 0.4) -> Callable[[Path, Path], Tables]:
    """Shares only the second block in FedHSSL: the linear layer's weights belong to positions of
    its quadrant.
    """

    def make(data: Path, _own: Path) -> Tables:
        source = {"source": str(data / "mnist10k.npz"), "label": "labels"}
        model = {
            "embedding_size": 64,
            "encoder": {"kind": "cnn", "channels": [16, 32], "shared": "blocks"},
        }
        task = {"kind": "multiclass", "classes": 10}
        return recipe(4, task, {"aligned": aligned}, model, {"scheme": "quadrants", "data": source})

    return make


def halves(data: Path, _own: Path) -> Tables:
    source = {"source": str(data / "mnist10k.npz"), "label": "labels"}
    model = {"embedding_size": 64, "encoder": {"kind": "cnn", "channels": [16, 32]}}
    task = {"kind": "multiclass", "classes": 10}
    return recipe(2, task, {"aligned": 0.4}, model, {"scheme": "halves", "data": source})


MLP: Tables = {
    "embedding_size": 64,
    "encoder": {"kind": "mlp", "hidden": [256], "batch_norm": True},
}


def uji(parties: int) -> Callable[[Path, Path], Tables]:
    def make(data: Path, own: Path) -> Tables:
        source = {"id": "id", "label": "place", "scale": "minmax"}
        source["source"] = str(studies.write_uji(data, own, "place"))
        task = {"kind": "multiclass", "classes": 13}
        return recipe(parties, task, {"aligned": 0.4}, MLP, {"scheme": "columns", "data": source})

    return make


def credit(data: Path, _own: Path) -> Tables:
    """Makes the active party of FATE's guest, which has the labels."""
    sources = {
        "active": {
            "source": str(data / "default_credit_hetero_guest.csv.gz"),
            "id": "id",
            "label": "y",
        },
        "passive1": {"source": str(data / "default_credit_hetero_host.csv.gz"), "id": "id"},
    }
    return recipe(2, {"kind": "binary"}, {"aligned": 0.4}, MLP, {"parties": sources})


@dataclass(frozen=True)
class Cross:
    """The chosen settings of the cross-party step: its epochs a round, and the weight of its
    guidance.
    """

    epochs: int
    gamma: float


def all_methods(common: Tables, cross: dict[str, Cross], head: Tables) -> list[Tables]:
    """Makes every line of the paper's tables. ``common``: settings of all pretraining; ``cross``:
    by SSL method.
    """
    lines: list[Tables] = [{"name": "FedSplitNN"}]

    def line(name: str, ssl: str, **switches: Any) -> None:
        settings = {"kind": "fedhssl", "ssl": ssl, **common, **switches}
        lines.append({"name": f"{name}{NAMES[ssl]}", "pretrain": [settings]})

    def star(name: str, ssl: str) -> None:
        """Adds fine-tuning of only the local encoder, after the same pretraining."""
        lines.append(
            {
                "name": f"{name}-star-{NAMES[ssl]}",
                "pretrain_of": f"{name}-{NAMES[ssl]}",
                "tower": "local",
            }
        )

    for ssl in NAMES:
        line("FedLocal", ssl, cross=False, aggregate=False)
    for ssl in NAMES:
        line("FedCSSL-", ssl, local=False, aggregate=False, cross_epochs=cross[ssl].epochs)
    for ssl in NAMES:
        line(
            "FedGSSL-", ssl, aggregate=False, cross_epochs=cross[ssl].epochs, gamma=cross[ssl].gamma
        )
        star("FedGSSL", ssl)
    for ssl in NAMES:
        line("FedHSSL-", ssl, cross_epochs=cross[ssl].epochs, gamma=cross[ssl].gamma)
        star("FedHSSL", ssl)
    for ssl in ("simclr", "moco"):
        settings = {"kind": "contrastive", "ssl": ssl, **common}
        lines.append(
            {"name": f"SS-VFL-I-{ssl}", "pretrain": [settings], "finetune": [head, EVALUATE]}
        )
        lines.append({"name": f"SS-VFL-C-{ssl}", "pretrain_of": f"SS-VFL-I-{ssl}"})
    return lines


SPLIT: Tables = {
    "kind": "splitnn",
    "steps": 300,
    "batch_size": 50,
    "validate_every": 30,
    "optimizer": sgd(0.01),
}
# Chosen on the validation rows of seed 11 of cvt-mnist with 200 labels, among learning rates of
# 0.002, 0.005 and 0.01, thresholds of 0.5 to 0.95, lambdas of 0 to 0.1 and both presets; the other
# tasks have the same.
FEDCVT: Tables = SPLIT | {
    "kind": "fedcvt",
    "unlabelled_batch_size": 128,
    "own_batch_size": 128,
    "threshold": 0.5,
    "optimizer": {"kind": "adam", "lr": 0.005},
}
LAMBDAS = ("shared", "overlap_active", "overlap_passive", "estimate_active", "estimate_passive")
HEAD: Tables = {"kind": "head", "steps": 300, "batch_size": 50, "optimizer": sgd(0.01)}


def cross_view() -> list[Tables]:
    """Makes FedCVT's lines: with both presets, and without what makes it more than split training.

    FedCVT trains the whole model, so it takes the place of fine-tuning. FedCVT-sure was made after
    the others had lost on the test rows of seed 1 of cvt-uji and cvt-credit, and chosen on the
    validation rows of seed 11 of cvt-uji.
    """

    def line(name: str, preset: str, value: float, **changes: Any) -> Tables:
        phase = FEDCVT | {"lambdas": dict.fromkeys(LAMBDAS, value)} | changes
        return {"name": name, "finetune": [phase, EVALUATE], "overrides": {"preset": preset}}

    adam = SPLIT | {"optimizer": FEDCVT["optimizer"]}
    return [
        {"name": "FedSplitNN-Adam", "finetune": [adam, EVALUATE]},
        line("FedCVT", "released", 0.01),
        line("FedCVT-paper", "paper", 0.001),
        line("FedCVT-sure", "released", 0.01, threshold=0.98, optimizer=SPLIT["optimizer"]),
        line("FedCVT-no-own-rows", "released", 0.01, own_batch_size=0),
        line("FedCVT-labelled-rows", "released", 0.01, own_batch_size=0, unlabelled_batch_size=0),
    ]


def _mnist_task(methods: list[Tables], labels: tuple[int, ...], aligned: float = 0.4) -> Task:
    return Task(mnist(aligned), labels, "accuracy", methods, [SPLIT, EVALUATE])


def _table_task(make: Callable[[Path, Path], Tables], metric: str, common: Tables) -> Task:
    methods = all_methods(common, dict.fromkeys(NAMES, Cross(2, 0.5)), HEAD)
    return Task(make, (200, 1000), metric, methods, [SPLIT, EVALUATE])


# A mirrored digit is another digit. The values were chosen on the validation rows of seed 11: B and
# the learning rate for FedLocal, fine-tuning's for FedSplitNN, and for FedHSSL with MoCo gamma of
# 0.1, 0.2 and 0.5; what it shares, on those of seeds 11 and 12.
CROSS = {"simsiam": Cross(2, 0.2), "byol": Cross(2, 0.2), "moco": Cross(4, 0.1)}
DIGITS: Tables = {
    "rounds": 10,
    "batch_size": 128,
    "queue": 2048,
    "augment": {"flip": 0.0},
    "optimizer": sgd(0.1, weight_decay=3e-5, schedule="cosine"),
}
TABLE: Tables = {
    "rounds": 6,
    "batch_size": 256,
    "optimizer": sgd(0.05, weight_decay=3e-5, schedule="cosine"),
}


def _mnist_methods() -> list[Tables]:
    """Adds FedHSSL that shares all above the first block, including the linear layer."""
    methods, whole = (
        all_methods(DIGITS, CROSS, HEAD),
        {"overrides": {"model.encoder.shared": "all"}},
    )
    for line in [line for line in methods if line["name"].startswith("FedHSSL")]:
        renamed = {
            key: line[key].replace("FedHSSL", "FedHSSL-all")
            for key in ("name", "pretrain_of")
            if key in line
        }
        methods.append(line | renamed | whole)
    return methods


UPDATES = (1, 4, 8)
ROUNDS = (2, 5, 10)


def _rounds_methods() -> list[Tables]:
    """Makes FedHSSL-SimSiam with e updates on one exchange, for each number of rounds; each has its
    own schedule.
    """
    lines = []
    for e in UPDATES:
        for rounds in ROUNDS:
            settings = {
                "kind": "fedhssl",
                "ssl": "simsiam",
                **DIGITS,
                "gamma": 0.2,
                "rounds": rounds,
                "local_updates": e,
            }
            lines.append({"name": f"e{e}-r{rounds}", "pretrain": [settings]})
    return lines


def _bytes_methods() -> list[Tables]:
    """Validates split training after every epoch, to know the step at which it reaches an
    accuracy.
    """
    fine = [SPLIT | {"steps": 600, "validate_every": 1}, EVALUATE]
    uploads = [line for line in all_methods(DIGITS, CROSS, HEAD) if "SS-VFL-I" in line["name"]]
    return [{"name": "FedSplitNN", "finetune": fine}, *uploads]


def _cvt_task(make: Callable[[Path, Path], Tables], metric: str, hssl: list[Tables]) -> Task:
    beside = [line for line in hssl if line["name"] in ("FedSplitNN", "FedHSSL-MoCo")]
    return Task(make, (200, 1000), metric, [*beside, *cross_view()], [SPLIT, EVALUATE])


_HSSL_TABLE = all_methods(TABLE, dict.fromkeys(NAMES, Cross(2, 0.5)), HEAD)

TASKS: dict[str, Task] = {
    "mnist": _mnist_task(_mnist_methods(), (100, 200)),
    "uji2": _table_task(uji(2), "accuracy", TABLE),
    "uji4": _table_task(uji(4), "accuracy", TABLE),
    "credit": _table_task(credit, "auc", TABLE),
    "cvt-mnist": _cvt_task(halves, "accuracy", all_methods(DIGITS, CROSS, HEAD)),
    "cvt-uji": _cvt_task(uji(2), "accuracy", _HSSL_TABLE),
    "cvt-credit": _cvt_task(credit, "auc", _HSSL_TABLE),
    "rounds": _mnist_task(_rounds_methods(), (200,), aligned=0.2),
    "bytes": _mnist_task(_bytes_methods(), (200, 1000, 2800)),
}


def print_bytes(folder: Path, results: Sequence[FineTuned]) -> None:
    """Prints, for each SS-VFL-I run, its upload, and the bytes of split training (same seed,
    labels) until as good.

    Good is accuracy on validation rows. Bytes are message bytes of training, gradients included;
    those that carry validation or test rows are left out on both sides.
    """
    shown = Table(
        "method",
        "labels",
        "seed",
        "accuracy",
        "uploaded",
        "split training: best",
        "bytes until as good",
    )
    for result in results:
        if not result.method.startswith("SS-VFL-I"):
            continue
        other = next(
            r
            for r in results
            if (r.method, r.seed, r.labels) == ("FedSplitNN", result.seed, result.labels)
        )
        head = load_summary(folder / result.finetune.run / "summary.json")
        sent = studies.message_bytes(head, "head", "embedding")
        split = load_summary(folder / other.finetune.run / "summary.json")
        run = folder / other.finetune.run
        a_step = studies.step_bytes(run, split, "splitnn", "accuracy")
        curve = studies.curve(run, "splitnn", "accuracy")
        accuracy = result.metrics["validation"]["accuracy"]
        reached = next((steps for steps, value in curve if value >= accuracy), None)
        best = max(value for _, value in curve)
        until = (
            f"{a_step * reached / 1e6:.2f} MB, {a_step * reached / sent:.0f} times"
            if reached
            else "never"
        )
        cells = (
            result.method,
            str(result.labels),
            str(result.seed),
            f"{accuracy:.3f}",
            f"{sent / 1e6:.3f} MB",
        )
        shown.add_row(*cells, f"{best:.3f}", until)
    Console(width=160).print(shown)


def draw_rounds(results: Sequence[FineTuned], path: Path) -> None:
    """Draws accuracy against rounds, and against pretraining bytes: a line for each e (the paper's
    Fig. 7).
    """
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for e, color in zip(UPDATES, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        x, megabytes, y, sd = [], [], [], []
        for rounds in ROUNDS:
            runs = [result for result in results if result.method == f"e{e}-r{rounds}"]
            values = [100 * result.value("accuracy") for result in runs]
            if values:
                middle, spread = compute_mean_and_sd(values)
                x.append(rounds)
                megabytes.append(runs[0].pretrain.message_bytes / 1e6)
                y.append(middle)
                sd.append(spread or 0.0)
        left.errorbar(x, y, sd, color=color, marker="o", capsize=3, label=f"e = {e}")
        right.errorbar(megabytes, y, sd, color=color, marker="o", capsize=3, label=f"e = {e}")
    left.set_xlabel("rounds of pretraining")
    right.set_xlabel("pretraining bytes, all parties (MB)")
    left.set_ylabel("test accuracy, 200 labels (points)")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "FedHSSL-SimSiam: updates on one exchange, MNIST-10k quadrants, 20 % aligned",
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)


def _quick(task: Task) -> Task:
    """Shrinks a task to a check that it still runs: three methods, one round, one number of
    labels.
    """
    kept = [
        line
        for line in task.methods
        if line["name"] in ("FedSplitNN", "FedHSSL-MoCo", "SS-VFL-I-moco", "e1-r2")
    ]
    for line in kept:
        for phase in line.get("pretrain", []):
            phase["rounds"] = 1
    return Task(task.recipe, task.labels[:1], task.metric, kept, task.finetune)


@click.command()
@click.argument("name", type=click.Choice(list(TASKS)))
@click.option(
    "--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--seeds", default="1,2,3", show_default=True, help="Seeds of the runs, with commas between."
)
@click.option(
    "--out",
    default="runs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of runs.",
)
@click.option(
    "--methods",
    default="",
    help="Only these, with commas between; FedSplitNN is always among them.",
)
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    help="Federations to run at once; the seconds depend on it.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="One seed, three methods, one round: checks only that it still runs.",
)
def main(
    name: str, data: Path, seeds: str, out: Path, methods: str, jobs: int, quick: bool
) -> None:
    """Runs one table; skips runs that are already finished in --out."""
    task, wanted = TASKS[name], [int(seed) for seed in seeds.split(",")]
    if quick:
        task, wanted = _quick(task), wanted[:1]
    lines = [
        line
        for line in task.methods
        if not methods or line["name"] in {"FedSplitNN", *methods.split(",")}
    ]
    study_name = f"ssl-{name}{'-quick' if quick else ''}"
    base = task.recipe(data.resolve(), studies.files_of(study_name, out))
    study = {
        "seeds": wanted,
        "labels": list(task.labels),
        "metric": task.metric,
        "finetune": task.finetune,
        "methods": lines,
    }
    done = studies.run(study_name, base, study, out, jobs)
    Console(width=160).print(table(done.study, done.results))
    if name == "bytes":
        print_bytes(done.folder, done.results)
    if name == "rounds":
        draw_rounds(done.results, done.folder / "results.png")
    if not quick:
        studies.keep(done)


if __name__ == "__main__":
    main()
