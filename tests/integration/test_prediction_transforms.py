"""Transforms that a recipe asks for on predictions: they hold for joint predictions and for a served
model, with their cost, and a recipe whose transform could not be applied is refused before training.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vfl
from tests.harness.errors import raises
from tests.harness.online import store_of
from vfl_common.errors import Code, InputError
from vfl_governance.account.limits import of_prediction
from vfl_party.base.mechanism import Mechanism
from vfl_party.predict.prediction import exchanges_of
from vfl_serve.answering import SentBefore
from vfl_serve.kinds import make_answers

ROWS = 40
NUMBERS = np.random.default_rng(4)
X = NUMBERS.normal(size=(ROWS, 4))
IDS = [f"K-{number}" for number in range(ROWS)]
NOISE = {
    "kind": "clipped_gaussian",
    "exchange": "prediction",
    "clip": 1.0,
    "epsilon": 2.0,
    "delta": 1e-5,
}
SPLIT: dict[str, Any] = {"kind": "splitnn", "epochs": 2, "batch_size": 8}
TREES = {"kind": "secureboost", "trees": 2, "depth": 2, "bins": 8, "encryption": "none"}


def trained(out: Path, *phases: dict[str, Any]) -> vfl.Run:
    frame = pd.DataFrame({"id": IDS, **{f"x{at}": X[:, at] for at in range(4)}})
    left = frame[["id", "x0", "x1"]].assign(left=(X[:, 0] > 0).astype(int))
    for name, table in (("bank", left), ("shop", frame[["id", "x2", "x3"]])):
        table.to_csv(out / f"{name}.csv", index=False)
    recipe = {
        "name": "noisy",
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "model": {"embedding_size": 2, "encoder": {"kind": "mlp", "hidden": [6]}},
        "phases": [*phases],
    }
    data = {
        "bank": vfl.Data(str(out / "bank.csv"), id="id", label="left"),
        "shop": vfl.Data(str(out / "shop.csv"), id="id"),
    }
    return vfl.simulate(vfl.Recipe.from_dict(recipe), data, out=out / "runs", quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> vfl.Run:
    return trained(tmp_path_factory.mktemp("noisy"), SPLIT | {"transforms": [NOISE]})


def test_a_prediction_has_its_noise_and_training_has_none_of_it(
    run: vfl.Run, tmp_path: Path
) -> None:
    plain = trained(tmp_path, SPLIT)
    shop = [
        each.model("shop").embed(pd.DataFrame(X[:, 2:], columns=["x2", "x3"]))
        for each in (run, plain)
    ]
    assert shop[0].equal(shop[1])
    first, again, without = (np.array(each.predict()["score_1"]) for each in (run, run, plain))
    assert (first != without).mean() > 0.9
    # Each joint prediction draws its own.
    assert (first != again).mean() > 0.9
    assert without.tolist() == list(plain.predict()["score_1"])


def test_a_served_model_has_the_same_noise_for_each_question(run: vfl.Run, tmp_path: Path) -> None:
    store = store_of(run.folder, "shop")
    shop = make_answers(store, lambda: SentBefore(tmp_path / "sent.sqlite", "run"), None)
    until_s = time.monotonic() + 60.0
    found = [np.frombuffer(shop(IDS, until_s).embeddings, "<f4") for _ in range(2)]
    assert found[0].tolist() == found[1].tolist()
    rows = store.held.look_up(IDS, until_s)
    clean = store.held.embed(rows, rows.rows).numpy().reshape(-1)
    assert (found[0] != clean).all()
    # The record says how it left, and what it costs.
    _, _, _, chain, _, cost = shop.way
    assert chain.startswith("clip to 1, Gaussian noise")
    assert Mechanism.read(cost)
    shop.close()


def test_the_account_knows_what_a_prediction_costs(run: vfl.Run) -> None:
    party = store_of(run.folder, "shop").held.party
    (planned,) = of_prediction(party, exchanges_of(party), 10).values()
    assert [*planned.costs.values()] == [1]


@pytest.mark.parametrize(
    "phase",
    [
        SPLIT | {"transforms": [NOISE | {"sent_by": "active"}]},
        SPLIT | {"transforms": [{"kind": "marvell", "exchange": "prediction", "scale": 1.0}]},
        SPLIT | {"transforms": [NOISE | {"clip": -1.0}]},
        TREES | {"transforms": [NOISE]},
        SPLIT | {"name": "serve"},
    ],
    ids=["answers", "of labels", "setting", "trees", "a phase of this name"],
)
def test_a_transform_that_could_not_be_applied_is_refused_before_training(
    phase: dict[str, Any], tmp_path: Path
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        trained(tmp_path, phase)
    assert not [*tmp_path.glob("runs/*/*/checkpoints/*")]
