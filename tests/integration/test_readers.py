"""The same rows in other files train the same model: bit for bit, also between real programs."""

from __future__ import annotations

import bz2
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vfl

N, F = 90, 6


def values() -> tuple[Any, Any]:
    random = np.random.default_rng(4)
    x = random.normal(size=(N, F)).round(3) * (random.random((N, F)) < 0.7)
    return x, (x.sum(axis=1) > 0).astype(int)


def lines(separator: str, *, ids: bool) -> list[str]:
    x, y = values()
    return [
        separator.join([*([f"{row:02}"] if ids else []), str(y[row]), *(f"{v:g}" for v in x[row])])
        for row in range(N)
    ]


NAMES = ["label", *(f"f{at}" for at in range(1, F + 1))]


def plain(folder: Path) -> dict[str, Any]:
    text = "\n".join([",".join(["id", *NAMES]), *lines(",", ids=True)])
    (folder / "x.csv").write_text(text)
    return {"source": str(folder / "x.csv"), "id": "id"}


def libsvm(folder: Path) -> dict[str, Any]:
    x, y = values()
    text = "".join(
        f"{y[row]} {' '.join(f'{at}:{v:g}' for at, v in enumerate(x[row], 1) if v)}\n"
        for row in range(N)
    )
    (folder / "x.bz2").write_bytes(bz2.compress(text.encode()))
    return {"source": str(folder / "x.bz2"), "format": "libsvm", "names": F, "id": "row"}


def several_signs(folder: Path) -> dict[str, Any]:
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.writestr("deep/x.dat", "\n".join(lines("::", ids=False)))
    keys = {"format": "text", "separator": "::", "names": NAMES, "id": "row"}
    return {"source": str(folder / "x.zip" / "deep" / "x.dat"), **keys}


def recipe(data: dict[str, Any]) -> vfl.Recipe:
    found = {
        "name": "readers",
        "seed": 3,
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "rows": {"align": "digest"},
        "model": {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [8]}},
        "phases": [{"kind": "splitnn", "epochs": 2, "batch_size": 8}, {"kind": "evaluate"}],
        "simulate": {"scheme": "columns", "data": {**data, "label": "label"}},
    }
    return vfl.Recipe.from_dict(found)


@pytest.mark.parametrize("limit", [None, 60])
def test_other_files_with_the_same_rows_train_the_same(tmp_path: Path, limit: int | None) -> None:
    chosen = {} if limit is None else {"limit": limit, "limit_by": "random"}
    metrics = [
        vfl.simulate(recipe({**made(tmp_path), **chosen}), quiet=True).metrics
        for made in (plain, libsvm, several_signs)
    ]
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0]["test"]


def test_buckets_in_process_equal_those_over_grpc(tmp_path: Path) -> None:
    data = {**plain(tmp_path), "categorical": ["f1", "f4"], "categorical_buckets": 5}
    one = vfl.simulate(recipe(data), quiet=True)
    other = vfl.simulate(recipe(data), quiet=True, processes=True)
    assert one.metrics == other.metrics
    # Values that training did not have have a bucket, too.
    found = one.predict()
    assert found["state"] == ["scored"] * N
    assert found["score_1"] == other.predict()["score_1"]
