"""What metrics of each epoch and the last round tell of labels, even when noise covers every gradient.

The figures in docs/security/who-learns-what.md are of these tables: ``pytest -s`` prints them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.harness import cases
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe

ROWS = 1000
X_NF = np.random.default_rng(0).normal(size=(ROWS, 4))


def validation_metrics(
    folder: Path, labels: npt.NDArray[np.int64], epochs: int, seed: int = 1, **phase: Any
) -> list[dict[str, float]]:
    """Returns what the active party tells the server of the validation rows, for each epoch."""
    folder.mkdir()
    data = {}
    for number, name in enumerate(("p0", "p1")):
        columns: dict[str, npt.NDArray[Any]] = {
            f"c{at}": X_NF[:, 2 * number + at] for at in range(2)
        }
        columns |= {"y": labels} if name == "p0" else {}
        path = folder / f"{name}.csv"
        lines = [
            f"r{row:04},{','.join(map(str, each))}"
            for row, each in enumerate(zip(*columns.values(), strict=True))
        ]
        path.write_text("\n".join([",".join(["id", *columns]), *lines]) + "\n")
        settings = {"source": str(path), "id": "id"} | ({"label": "y"} if name == "p0" else {})
        data[name] = parse(DataSettings, settings, "data")
    tables = cases.recipe(
        2,
        task={"kind": "binary"},
        rows={"validation": 0.2, "test": 0.2},
        phase={"epochs": epochs, "batch_size": 64, **phase},
    )
    found: list[dict[str, float]] = []

    def observe(
        name: str, _phase: str, _done: int, _rounds: int, metrics: Any, _models: Any
    ) -> None:
        if name == "p0" and "validation" in metrics:
            found.append(dict(metrics["validation"]))

    run_in_process(
        parse(Recipe, tables | {"seed": seed}, "recipe"), data, folder / "run", observe=observe
    )
    return found


@pytest.mark.parametrize("share", [0.05, 0.2, 0.35])
def test_the_accuracy_of_the_first_epoch_tells_the_share_of_the_rare_class(
    share: float, tmp_path: Path
) -> None:
    """An early model decides for the frequent class everywhere, so that its errors are the others."""
    labels = (np.random.default_rng(1).random(ROWS) < share).astype(np.int64)
    (metrics,) = validation_metrics(tmp_path / "run", labels, 1)
    error = 1 - metrics["accuracy"]
    print(f"{labels.mean():.3f} of all rows, 1 - accuracy = {error:.3f}")
    # Validation has 200 rows: three standard deviations of their share.
    assert abs(error - labels.mean()) <= 3 * np.sqrt(share * (1 - share) / 200)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_round_of_early_stopping_tells_whether_columns_foretell_labels(
    seed: int, tmp_path: Path
) -> None:
    """Each party sees the number of rounds."""
    rng = np.random.default_rng(seed)
    labels = (X_NF.sum(1) + rng.normal(size=ROWS) > 0).astype(np.int64)
    stops = {"early_stopping": {"patience": 1}}
    true = len(validation_metrics(tmp_path / "true", labels, 30, seed, **stops))
    other = len(
        validation_metrics(tmp_path / "permuted", rng.permutation(labels), 30, seed, **stops)
    )
    print(f"seed {seed}: {true} rounds, {other} with permuted labels")
    assert true > other
