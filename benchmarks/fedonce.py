"""FedOnce and its baselines over real federations: ``python -m benchmarks.fedonce TASK --data
DIR``.

Each task is a study (``vfl study``); each run is k + 1 processes over gRPC with mutual TLS. Tables
and plots go to ``benchmarks/results/``. What was chosen (learning rates, epochs) was chosen on
validation rows of seed 11, which is not reported; the rest is the paper's (Tables 2, 3, 5 and 10).

    phishing     10 parties, 68 columns: FedOnce-L0, more rounds, PCA, split training, Solo, Combine,
                 LightGBM
    uji          UJIIndoorLoc, 10 parties, longitude from the strengths of 520 access points
    mnist        MNIST-10k in quadrants, 4 parties
    dp-phishing  FedOnce-L1, 4 parties: moments and simple division, fixed and matched targets, by
                 epsilon
    dp-uji       the same on UJIIndoorLoc
    scale        10 to 200 passive parties on this machine: seconds, memory, accuracy
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import studies
from benchmarks.fedonce_charts import draw_comparison, draw_privacy, draw_scale
from benchmarks.fedonce_numbers import print_privacy, print_reach, print_scale, write_curves
from benchmarks.fedonce_recipes import Make, adam, mnist, phishing, places, uji
from benchmarks.fedonce_trees import add_rows, counted, encrypted_line, lines_of, print_trees
from benchmarks.memory import Watch
from benchmarks.studies import EVALUATE, Done, Tables
from vfl_lab.studies.report import table
from vfl_party.base.seeds import split_rows

# Message bytes of the upload over its payload.
MOST_ENVELOPE = 1.02
QUICK_ROWS = 1000


@dataclass(frozen=True)
class Task:
    """A study. ``after``: checks, prints and draws its runs' results. ``kept``: the results for the
    repository.
    """

    recipe: Make
    metric: str
    methods: list[Tables]
    after: Callable[[Done], None]
    kept: tuple[str, ...] = ("results.csv", "results.png")
    seeds: str = "1,2,3,4,5"


# --- FedOnce-L0 and what it is compared with
# ----------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The settings chosen for a task. ``alone``: for Solo and Combine; ``wide``: their model, if
    not ``recipe``'s.
    """

    local: Tables
    head: Tables
    # Split training after FedOnce.
    more: Tables
    split: Tables
    alone: Tables
    linear: Tables
    wide: Tables
    trees: Tables
    # SecureBoost's.
    boosted: Tables | None = None
    outputs: int = 1
    # The paper's head, if it differs from the chosen one.
    table5: Tables | None = None


def methods_of(training: Training, rows: int, parties: int, upload_bytes: int) -> list[Tables]:
    """Makes the methods to compare. ``upload_bytes``: payload of FedOnce's upload, at which
    SplitNN-Comm stops.
    """
    local, head = (
        {"kind": "fedonce", **training.local},
        {"kind": "head", "own_encoder": "trained", **training.head},
    )
    split, more = {"kind": "splitnn", **training.split}, {"kind": "splitnn", **training.more}
    one_shot = EVALUATE | {"name": "one-shot"}
    linear = {"model.encoder": {"kind": "mlp", "hidden": []}, "model.top": {"hidden": []}}
    linear["model.embedding_size"] = training.outputs  # type: ignore[assignment]
    trees = [{"kind": "gbdt", **training.trees}]
    alone, flat = (
        [{"kind": "splitnn", **each}, EVALUATE] for each in (training.alone, training.linear)
    )
    lines: list[Tables] = [
        {"name": "FedOnce-L0", "pretrain": [local], "finetune": [head, EVALUATE]},
        {
            "name": "FedOnce-L0-multi",
            "pretrain_of": "FedOnce-L0",
            "finetune": [head, one_shot, more, EVALUATE],
        },
        {
            "name": "FedOnce-PCA",
            "pretrain": [{"kind": "fedonce", "objective": "pca"}],
            "finetune": [head, EVALUATE],
        },
        {"name": "SplitNN", "finetune": [split, EVALUATE]},
        {"name": "SplitNN-Comm", "finetune": [split | {"max_bytes": upload_bytes}, EVALUATE]},
        {"name": "Solo", "alone": studies.ACTIVE, "overrides": training.wide, "finetune": alone},
        {"name": "Combine", "combined": True, "overrides": training.wide, "finetune": alone},
        {"name": "Linear-Combine", "combined": True, "overrides": linear, "finetune": flat},
        {"name": "LightGBM", "finetune": trees},
        {"name": "LightGBM-Combine", "combined": True, "finetune": trees},
    ]
    if training.boosted is not None:
        lines += lines_of(training.boosted, rows, parties, upload_bytes)
    if training.table5 is not None:
        paper = [head | training.table5, EVALUATE]
        lines.insert(
            1, {"name": "FedOnce-L0-table5", "pretrain_of": "FedOnce-L0", "finetune": paper}
        )
    return lines


def comparison(
    make: Make, title: str, metric: str, parties: int, d: int, training: Training
) -> Callable[[int], Task]:
    """Returns a function from the number of rows to the task: the upload's size depends on that
    number.
    """

    def task(rows: int) -> Task:
        train = training_rows(rows)
        upload_bytes = 4 * train * d * (parties - 1)

        def after(done: Done) -> None:
            check_upload(done, upload_bytes)
            print_reach(done)
            write_curves(done, done.folder / "curves.csv")
            print_trees(done, rows, upload_bytes)
            if done.of("FedOnce-L0"):
                draw_comparison(done, title, done.folder / "results.png")

        kept = ("results.csv", "curves.csv", "results.png")
        return Task(make, metric, methods_of(training, train, parties, upload_bytes), after, kept)

    return task


def training_rows(rows: int) -> int:
    return len(split_rows(0, rows, validation=studies.VALIDATION, test=studies.TEST)["train"])


def check_upload(done: Done, payload_bytes: int) -> None:
    """Asserts that FedOnce's only exchange in training is the paper's, 4 * n * d * (k - 1)
    bytes.
    """
    for result in done.of("FedOnce-L0"):
        summary = done.summary(result)
        sent = summary.bytes.by_phase["head"]
        assert summary.bytes.agrees, f"{result.finetune.run}: the ledgers of the two ends differ"
        assert sent.payload_bytes == payload_bytes, (
            f"{sent.payload_bytes} bytes of payload, not {payload_bytes}"
        )
        envelope = sent.message_bytes / sent.payload_bytes
        assert envelope <= MOST_ENVELOPE, f"messages are {envelope:.4f} of their payload"
        crossed = [link for link in summary.bytes.by_link if link.kind == "gradient"]
        assert not crossed, f"{result.finetune.run}: gradients crossed"
    if done.of("FedOnce-L0"):
        print(
            f"FedOnce-L0 uploads {payload_bytes:,} bytes = 4 n d (k - 1); its messages are "
            f"{envelope:.4f} of that"
        )


# Nobody has to send it.
WIDE: Tables = {"model.embedding_size": 30}
TREES: Tables = {"early_stopping": 50}
BOOSTED: Tables = TREES | {"bins": 32}

PHISHING = Training(
    # Table 5.
    local={"epochs": 100, "batch_size": 100, "optimizer": adam(1e-4, 1e-5)},
    head={"epochs": 100, "batch_size": 100, "optimizer": adam(1e-3, 1e-4)},
    more={"epochs": 60, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    split={"epochs": 60, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    alone={"epochs": 100, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    linear={"epochs": 100, "batch_size": 100, "optimizer": adam(1e-3)},
    wide=WIDE,
    trees=TREES,
    boosted=BOOSTED | {"depth": 7, "learning_rate": 0.1, "trees": 400},
    table5={"epochs": 300, "batch_size": 100, "optimizer": adam(1e-4, 1e-4)},
)
UJI = Training(
    local={"epochs": 60, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    head={"epochs": 100, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    more={"epochs": 40, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    split={"epochs": 40, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    alone={"epochs": 50, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)},
    linear={"epochs": 50, "batch_size": 100, "optimizer": adam(1e-3)},
    wide=WIDE,
    trees=TREES | {"trees": 1000},
    boosted=BOOSTED | {"depth": 6, "learning_rate": 0.3, "trees": 300},
)
MNIST = Training(
    local={"epochs": 20, "batch_size": 128, "match_every": 3, "optimizer": adam(1e-3, 1e-5)},
    # Table 5, except for the epochs.
    head={"epochs": 20, "batch_size": 128, "optimizer": adam(1e-3, 1e-5)},
    more={"epochs": 15, "batch_size": 128, "optimizer": adam(1e-3, 1e-5)},
    split={"epochs": 15, "batch_size": 128, "optimizer": adam(1e-3, 1e-5)},
    alone={"epochs": 15, "batch_size": 128, "optimizer": adam(1e-3, 1e-5)},
    linear={"epochs": 30, "batch_size": 128, "optimizer": adam(1e-3)},
    wide={"model.embedding_size": 64},
    trees=TREES,
    outputs=10,
)

# --- FedOnce-L1
# ----------------------------------------------------------------------

EPSILONS = (2.0, 4.0, 6.0, 8.0)
VARIANTS: dict[str, Tables] = {
    "moments-fixed": {},
    "moments-matched": {"mode": "matched"},
    "simple-fixed": {"division": "simple"},
}


@dataclass(frozen=True)
class Private:
    """Settings of Table 10 for one epsilon: SGD, batches, epochs and the clipping norm."""

    batch_size: int
    norm: float
    local_lr: float
    local_epochs: int
    head_lr: float
    head_epochs: int


PRIVATE_PHISHING = {
    2.0: Private(32, 1.0, 0.3, 10, 0.3, 30),
    4.0: Private(32, 1.0, 0.2, 10, 0.2, 30),
    6.0: Private(32, 1.0, 0.3, 10, 0.1, 30),
    8.0: Private(128, 1.5, 0.3, 10, 0.3, 40),
}
PRIVATE_UJI = {
    2.0: Private(128, 1.5, 0.4, 10, 0.5, 10),
    4.0: Private(128, 1.5, 0.4, 12, 0.5, 20),
    6.0: Private(128, 1.5, 0.4, 12, 0.5, 30),
    8.0: Private(128, 1.5, 0.4, 12, 0.3, 60),
}


def private_methods(chosen: dict[float, Private]) -> list[Tables]:
    """Makes a method for each epsilon and variant. Without noise (infinity) the division has no
    meaning.
    """
    lines = []
    for variant, switches in VARIANTS.items():
        for epsilon in EPSILONS:
            lines.append(
                _private_method(
                    f"{variant}-{epsilon:g}", chosen[epsilon], {"epsilon": epsilon} | switches
                )
            )
        if "division" not in switches:
            lines.append(
                _private_method(
                    f"{variant}-inf", chosen[EPSILONS[-1]], {"noise_multiplier": 0.0} | switches
                )
            )
    return lines


def _private_method(name: str, chosen: Private, dp: Tables) -> Tables:
    dp = {"delta": 1e-5, "max_grad_norm": chosen.norm} | dp
    common = {"batch_size": chosen.batch_size, "dp": dp}
    local = {
        "kind": "fedonce",
        "epochs": chosen.local_epochs,
        "optimizer": {"kind": "sgd", "lr": chosen.local_lr},
    }
    head = {"kind": "head", "own_encoder": "trained", "epochs": chosen.head_epochs}
    head["optimizer"] = {"kind": "sgd", "lr": chosen.head_lr}
    return {"name": name, "finetune": [local | common, head | common, EVALUATE]}


def private_task(make: Make, title: str, metric: str, chosen: dict[float, Private]) -> Task:
    def after(done: Done) -> None:
        check_epsilon(done)
        print_privacy(done, list(VARIANTS), EPSILONS)
        draw_privacy(done, list(VARIANTS), EPSILONS, title, done.folder / "results.png")

    return Task(make, metric, private_methods(chosen), after)


def check_epsilon(done: Done) -> None:
    """Asserts that no run spent more than its recipe's epsilon."""
    for result in done.results:
        asked, privacy = result.method.rpartition("-")[2], done.summary(result).privacy
        assert privacy is not None, f"{result.finetune.run}: its summary says nothing of privacy"
        assert privacy.epsilon <= float(asked), (
            f"{result.finetune.run}: epsilon {privacy.epsilon} of {asked}"
        )


# --- many parties
# ----------------------------------------------------------------------

PASSIVES = (10, 25, 50, 100, 200)


def scale_task() -> Task:
    local = {"kind": "fedonce", "epochs": 20, "batch_size": 100, "optimizer": adam(1e-3, 1e-5)}
    head = {
        "kind": "head",
        "own_encoder": "trained",
        "epochs": 50,
        "batch_size": 100,
        "optimizer": adam(1e-3, 1e-5),
    }
    methods = [
        {
            "name": f"k{passives}",
            "overrides": {"parties": studies.roster(passives + 1)},
            "finetune": [local, head, EVALUATE],
        }
        for passives in PASSIVES
    ]

    def after(done: Done) -> None:
        print_scale(done)
        draw_scale(done, done.folder / "results.png")

    return Task(places, "accuracy", methods, after, seeds="1")


# --- the command
# ----------------------------------------------------------------------

ROWS = {"phishing": 11_055, "uji": 21_048, "mnist": 10_000}
PARTIES = {"phishing": 10, "uji": 10, "mnist": 4}
COMPARISONS = {
    "phishing": comparison(
        phishing(10, [30, 30], [30]), "phishing, 10 parties", "accuracy", 10, 3, PHISHING
    ),
    "uji": comparison(
        uji(10, 3, [50, 50, 50, 30], [30, 10]), "UJIIndoorLoc, 10 parties", "rmse", 10, 3, UJI
    ),
    "mnist": comparison(mnist, "MNIST-10k in quadrants, 4 parties", "accuracy", 4, 16, MNIST),
}
OTHERS = {
    "dp-phishing": private_task(
        phishing(4, [30], [10]), "phishing, 4 parties", "accuracy", PRIVATE_PHISHING
    ),
    "dp-uji": private_task(
        uji(4, 6, [50, 50], [20, 20]), "UJIIndoorLoc, 4 parties", "rmse_scaled", PRIVATE_UJI
    ),
    "scale": scale_task(),
}


def with_solos(task: Task, roster: list[Tables]) -> Task:
    """Adds Solo of the passive parties: ``Solo-passive1``, …"""
    (solo,) = (line for line in task.methods if line["name"] == "Solo")
    more = [solo | {"name": f"Solo-{each['name']}", "alone": each["name"]} for each in roster[1:]]
    return replace(task, methods=[*task.methods, *more])


def quick(task: Task) -> Task:
    """Shrinks a task to a check that it still runs: few rows, one epoch."""

    def make(data: Path, own: Path) -> Tables:
        made = task.recipe(data, own)
        made["simulate"]["data"]["limit"] = QUICK_ROWS
        return made

    kept = (
        "FedOnce-L0",
        "FedOnce-L0-multi",
        "SplitNN",
        "SplitNN-Comm",
        "Solo",
        "Combine",
        "LightGBM",
        "SecureBoost",
        "k10",
    )
    private = (*(f"{variant}-8" for variant in VARIANTS), "moments-fixed-inf")
    methods = [line for line in task.methods if line["name"] in (*kept, *private)]
    shorter = [
        line
        | {
            stage: [_one_epoch(phase) for phase in line[stage]]
            for stage in ("pretrain", "finetune")
            if stage in line
        }
        for line in methods
    ]
    return replace(task, recipe=make, methods=shorter, seeds=task.seeds[:1])


def _one_epoch(phase: Tables) -> Tables:
    return phase | {key: 1 for key in ("epochs", "trees", "early_stopping") if key in phase}


@click.command()
@click.argument("name", type=click.Choice([*COMPARISONS, *OTHERS]))
@click.option(
    "--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--seeds",
    default=None,
    help="Seeds of the runs, with commas between; default 1,2,3,4,5 (scale: 1).",
)
@click.option(
    "--out",
    default="runs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of runs.",
)
@click.option("--methods", default="", help="Only these, with commas between.")
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    help="Federations to run at once; the seconds depend on it.",
)
@click.option(
    "--solos", is_flag=True, help="Run Solo for every party, not only for the active one."
)
@click.option(
    "--ou",
    is_flag=True,
    help="Also run SecureBoost-Comm with encryption, and compare bytes and trees.",
)
@click.option(
    "--add", is_flag=True, help="Put the results into the kept table beside those that are there."
)
@click.option(
    "--quick",
    "short",
    is_flag=True,
    help="One seed, few rows, one epoch: only whether it still runs.",
)
def main(
    name: str,
    data: Path,
    seeds: str | None,
    out: Path,
    methods: str,
    jobs: int,
    solos: bool,
    ou: bool,
    add: bool,
    short: bool,
) -> None:
    """Runs one table; skips runs that are already finished in --out."""
    rows = QUICK_ROWS if short else ROWS.get(name, 0)
    task = COMPARISONS[name](rows) if name in COMPARISONS else OTHERS[name]
    task = quick(task) if short else task
    task = (
        with_solos(task, studies.roster(PARTIES[name])) if solos and name in COMPARISONS else task
    )
    if ou:
        task = replace(task, methods=[*task.methods, encrypted_line(task.methods)])
    wanted = [int(seed) for seed in (seeds or task.seeds).split(",")]
    lines = [line for line in task.methods if not methods or line["name"] in methods.split(",")]
    study_name = f"fedonce-{name}{'-quick' if short else ''}"
    study: dict[str, Any] = {"seeds": wanted, "metric": task.metric, "methods": lines}
    base = task.recipe(data.resolve(), studies.files_of(study_name, out))
    watch = Watch(out / study_name / "memory.json") if name == "scale" else contextlib.nullcontext()
    with watch:
        done = studies.run(study_name, base, study, out, 1 if name == "scale" else jobs)
    console = Console(width=160)
    results = [counted(done, each) for each in done.results]
    console.print(table(done.study, results))
    if task.metric == "rmse":
        console.print(table(done.study.model_copy(update={"metric": "rmse_scaled"}), results))
    task.after(done)
    if add:
        add_rows(done)
    elif not short and not methods:
        studies.keep(done, task.kept)


if __name__ == "__main__":
    main()
