"""A trial of Entity Augmentation where few rows overlap: ``python -m benchmarks.overlap --data DIR``.

Entity Augmentation (Amalanshu et al. 2024, arXiv 2406.17899) needs no rows in common: each party
embeds rows of its own, drawn apart from the others'. The embeddings are joined, whoever they are
of, and the label is the mean of those persons' labels, by the widths of the embeddings. Here it is
a loop in one process; the library has no such method.

A share of the training rows is held by all parties. Each other row is held by one, drawn at random,
and the party with the labels has them of all rows. Beside Entity Augmentation stand, with the same
steps and networks:

- ``alone``: the active party's model on its own rows;
- ``splitnn`` and ``FedHSSL``: the library, whose labelled rows are those that all hold. FedHSSL
  pretrains each party on all training rows, so on more than the others have.
- ``mean``: what is there, without a mixture: the mean of the embeddings of a row's parties, some
  left out at random of rows that all hold. It has the same labels as Entity Augmentation.

Each keeps the weights that are best on validation rows, which all parties hold, as the test rows.
Settings were chosen before the runs, and by no test row.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

import vfl
from benchmarks.missing_library import data_of
from benchmarks.missing_rows import BATCH, LR, TOP, WIDTH, Model, Trial
from benchmarks.missing_tasks import ACTIVE, TASKS, TEST, Setting, load
from benchmarks.studies import RESULTS
from vfl_common.files import write_atomic
from vfl_party.base.seeds import Rows, split_rows
from vfl_party.models.losses import loss_fn

Found = dict[str, Any]
OVERLAPS = (0.01, 0.05, 0.2)
VALIDATION = 0.1
STEPS, EVERY = 1000, 50
# With which probability ``mean`` keeps a party's embedding of a row that all hold.
KEPT = 0.5
EA = "Entity Augmentation"
WAYS = ("alone", "splitnn", "FedHSSL", EA, "mean")
# As in ``benchmarks.ssl`` on tables.
FEDHSSL = {
    "kind": "fedhssl",
    "ssl": "simsiam",
    "rounds": 3,
    "cross_epochs": 2,
    "gamma": 0.5,
    "optimizer": {
        "kind": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 3e-5,
        "schedule": "cosine",
    },
}


def measured(setting: Setting, way: str, overlap: float, seed: int) -> float:
    """Returns the task's metric on test rows, which all parties hold."""
    if way in ("splitnn", "FedHSSL"):
        return _by_library(setting, way, overlap, seed)
    splits = split_rows(seed, len(setting.y), validation=VALIDATION, test=TEST, aligned=overlap)
    trial = Overlap(setting, splits, seed)
    model = {"alone": trial.alone, EA: trial.augmented, "mean": trial.mean}[way]()
    every = np.ones((len(splits["test"]), len(setting.passives)), bool)
    return trial.quality(model, splits["test"], every)


class Overlap(Trial):
    """Rows of which all parties hold some, and one party each other one.

    ``splits``: as ``split_rows`` gives them.
    """

    def __init__(self, setting: Setting, splits: dict[str, Rows], seed: int) -> None:
        every = np.ones((len(setting.y), len(setting.passives)), bool)
        super().__init__(setting, splits["local"], every, seed, epochs=0)
        self._validation = splits["validation"]
        parties = len(setting.columns)
        owner = np.random.default_rng([seed, 4]).integers(0, parties, len(setting.y))
        holds = owner[:, None] == np.arange(parties)
        holds[splits["aligned"]] = True
        self._holds, self._random = holds, np.random.default_rng([seed, 3])

    def alone(self) -> Model:
        """Trains the active party's model on the rows that it holds."""
        model, own = Model(self._setting, "alone", self._seed), self._held(0)
        loss = loss_fn(self._setting.task)

        def of_batch() -> Tensor:
            rows = torch.from_numpy(self._random.choice(own, BATCH))
            return loss(
                model.outputs(model.embed(self._of(rows)), self._known[rows]), self._y[rows]
            )

        return self._trained(model, of_batch)

    def augmented(self) -> Model:
        """Trains by Entity Augmentation, on concatenated embeddings."""
        model = Model(self._setting, "party dropout", self._seed)
        held = {name: self._held(n) for n, name in enumerate(self._setting.columns)}
        everybody = torch.ones(BATCH, len(self._setting.passives), dtype=torch.bool)

        def of_batch() -> Tensor:
            rows = {n: torch.from_numpy(self._random.choice(of, BATCH)) for n, of in held.items()}
            z_BD = [model.encoders[name](self._columns[name][at]) for name, at in rows.items()]
            # The widths are equal, so the weights are.
            shares = torch.stack([self._shares(at) for at in rows.values()]).mean(dim=0)
            outputs = model.outputs(z_BD, everybody)
            if self._setting.task.kind == "binary":
                return F.binary_cross_entropy_with_logits(outputs, shares)
            return F.cross_entropy(outputs, shares)

        return self._trained(model, of_batch)

    def mean(self) -> Model:
        """Trains on the mean of the embeddings that there are of each row."""
        model = Model(self._setting, "subsets", self._seed)
        loss = loss_fn(self._setting.task)

        def of_batch() -> Tensor:
            rows = self._random.choice(self._train, BATCH)
            holds_BK = self._holds[rows]
            kept_BK = holds_BK & (self._random.random(holds_BK.shape) < KEPT)
            kept_BK = np.where(kept_BK.any(axis=1, keepdims=True), kept_BK, holds_BK)
            w_BK = torch.from_numpy(kept_BK).float()
            z_BKD = torch.stack(model.embed(self._of(torch.from_numpy(rows))), dim=1)
            z_BD = (z_BKD * w_BK[:, :, None]).sum(dim=1) / w_BK.sum(dim=1, keepdim=True)
            return loss(model.top(z_BD), self._y[torch.from_numpy(rows)])

        return self._trained(model, of_batch)

    def _held(self, party: int) -> Rows:
        """Returns the training rows that a party holds, by its place."""
        found: Rows = self._train[self._holds[self._train, party]]
        return found

    def _shares(self, rows: Tensor) -> Tensor:
        """Returns labels as shares of the classes, [B, O]."""
        if self._setting.task.kind == "binary":
            return self._y[rows]
        return F.one_hot(self._y[rows], self._setting.task.outputs).float()

    def _trained(self, model: Model, loss: Callable[[], Tensor]) -> Model:
        optimizer = torch.optim.Adam(model.parameters(), LR)
        best, weights = -1.0, dict[str, Tensor]()
        every = np.ones((len(self._validation), len(self._setting.passives)), bool)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (step + 1) % EVERY == 0:
                value = self.quality(model, self._validation, every)
                if value > best:
                    best, weights = value, copy.deepcopy(model.state_dict())
        model.load_state_dict(weights)
        return model


def _by_library(setting: Setting, way: str, overlap: float, seed: int) -> float:
    rows = split_rows(seed, len(setting.y), validation=VALIDATION, test=TEST, aligned=overlap)
    aligned = len(rows["aligned"])
    split = {
        "kind": "splitnn",
        "steps": STEPS,
        "validate_every": EVERY,
        "batch_size": BATCH,
        "optimizer": {"kind": "adam", "lr": LR},
        "early_stopping": {"patience": STEPS // EVERY, "metric": setting.metric},
    }
    recipe = {
        "name": "overlap",
        "seed": seed,
        "task": setting.task.model_dump(exclude_defaults=True),
        "parties": [
            {"name": name, "role": "active" if name == ACTIVE else "passive"}
            for name in setting.columns
        ],
        "rows": {"validation": VALIDATION, "test": TEST, "aligned": overlap},
        "model": {
            "embedding_size": WIDTH,
            "encoder": {"kind": "mlp", "hidden": [setting.hidden]},
            "top": {"hidden": [TOP]},
        },
        "phases": [
            *([FEDHSSL | {"batch_size": min(BATCH, aligned)}] if way == "FedHSSL" else []),
            split,
            {"kind": "evaluate", "splits": ["test"]},
        ],
        "run": {"checkpoint_every": 1000},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = vfl.simulate(recipe, data_of(setting), out=folder, quiet=True)
        return run.metrics["test"][setting.metric]


@click.command()
@click.option("--data", "folder", required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--json",
    "path",
    default=RESULTS / "overlap.json",
    show_default=True,
    type=click.Path(path_type=Path),
)
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    default=("phishing", "MNIST-10k", "credit"),
    type=click.Choice([*TASKS]),
)
def main(folder: Path, path: Path, seeds: int, tasks: tuple[str, ...]) -> None:
    """Compare ways to train where few rows overlap."""
    torch.set_num_threads(1)
    done: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    every = itertools.product(tasks, range(1, seeds + 1), OVERLAPS, WAYS)
    for task, seed, overlap, way in every:
        key = f"{task}/{overlap}/{way}/{seed}"
        if key not in done:
            done[key] = measured(load(task, folder, seed)[0], way, overlap, seed)
            write_atomic(path, json.dumps(done, indent=1, sort_keys=True) + "\n")
            click.echo(f"{key}: {100 * done[key]:.1f}")
    path.with_suffix(".md").write_text(shown(done, tasks))


def shown(done: dict[str, float], tasks: tuple[str, ...]) -> str:
    """Returns a table of means and deviations over the seeds."""
    heads = ["task", "overlap", "seeds", *WAYS]
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads))]
    for task, overlap in itertools.product(tasks, OVERLAPS):
        cells, seeds = list[str](), set[int]()
        for way in WAYS:
            start = f"{task}/{overlap}/{way}/"
            values = [100 * value for key, value in done.items() if key.startswith(start)]
            seeds.add(len(values))
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.fmean(values):.1f} ± {spread:.1f}")
        # Of a command that was stopped, ways may have one seed more than others.
        count = "–".join(str(each) for each in sorted(seeds))
        lines.append(f"| {task} | {100 * overlap:.0f} % | {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
