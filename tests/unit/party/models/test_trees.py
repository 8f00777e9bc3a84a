"""Trees as tensors: their scores are those of the libraries that have grown them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightgbm
import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from torch import Tensor

from tests.harness.errors import raises
from vfl_common.config.models import GbdtTop
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.losses import loss_fn
from vfl_party.models.trees import BoostedTrees, Matrix, TreeArrays, check_loss, grow

SETS = {"binary": load_breast_cancer, "multiclass": load_digits, "regression": load_diabetes}
ROUNDS, TRAIN = 40, 300
Library = Literal["sklearn", "lightgbm"]


def task_of(kind: str, **more: Any) -> TaskSettings:
    classes = {"classes": 10} if kind == "multiclass" else {}
    return TaskSettings.model_validate({"kind": kind, **classes, **more})


def rows(kind: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Rows with missing numbers, and whole columns of them as of a party that is away."""
    x_NF, y_N = SETS[kind](return_X_y=True)
    drawn = np.random.default_rng(1)
    x_NF = x_NF[:400].astype(np.float32).astype(np.float64)
    x_NF[drawn.random(x_NF.shape) < 0.2] = np.nan
    x_NF[drawn.random(len(x_NF)) < 0.3, : x_NF.shape[1] // 2] = np.nan
    return x_NF, y_N[:400].astype(np.float64)


def by_sklearn(kind: str, x: Any, y: Any, top: GbdtTop, weights: Any) -> Any:
    of = HistGradientBoostingRegressor if kind == "regression" else HistGradientBoostingClassifier
    stops = top.early_stopping is not None
    model = of(
        max_iter=top.trees,
        learning_rate=top.lr,
        max_leaf_nodes=top.leaves,
        min_samples_leaf=top.min_rows,
        l2_regularization=top.l2,
        early_stopping=stops,
        n_iter_no_change=top.early_stopping or 10,
        scoring="loss",
        random_state=3,
    )
    more = {"X_val": x[TRAIN:], "y_val": y[TRAIN:], "sample_weight_val": weights[TRAIN:]}
    model.fit(x[:TRAIN], y[:TRAIN], sample_weight=weights[:TRAIN], **(more if stops else {}))
    staged = model.staged_predict if kind == "regression" else model.staged_decision_function
    best = int(np.argmax(model.validation_score_)) if stops else top.trees
    return list(staged(x))[best - 1]


def by_lightgbm(kind: str, x: Any, y: Any, top: GbdtTop, weights: Any) -> Any:
    parameters = {
        "objective": kind,
        "learning_rate": top.lr,
        "num_leaves": top.leaves,
        "min_data_in_leaf": top.min_rows,
        "lambda_l2": top.l2,
        "seed": 3,
        "num_threads": torch.get_num_threads(),
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    if kind == "multiclass":
        parameters["num_class"] = 10
    data = lightgbm.Dataset(x[:TRAIN], y[:TRAIN], weight=weights[:TRAIN])
    watched: list[Any] = []
    callbacks: list[Callable[..., Any]] = []
    if top.early_stopping is not None:
        watched = [lightgbm.Dataset(x[TRAIN:], y[TRAIN:], data, weight=weights[TRAIN:])]
        callbacks = [lightgbm.early_stopping(top.early_stopping, verbose=False)]
    made = lightgbm.train(parameters, data, top.trees, watched, callbacks=callbacks)
    return made.predict(x, raw_score=True)


WANTED = {"sklearn": by_sklearn, "lightgbm": by_lightgbm}


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [None, 3])
@pytest.mark.parametrize("library", list(WANTED))
@pytest.mark.parametrize("kind", list(SETS))
def test_scores_are_those_of_the_library_bit_for_bit(
    kind: str, library: Library, early_stopping: int | None
) -> None:
    x_NF, y_N = rows(kind)
    weights = np.random.default_rng(2).uniform(0.5, 2.0, len(y_N))
    top = GbdtTop(
        kind="gbdt",
        library=library,
        trees=ROUNDS,
        lr=0.5,
        leaves=9,
        min_rows=5,
        l2=0.5,
        early_stopping=early_stopping,
    )
    train = Matrix(x_NF[:TRAIN], y_N[:TRAIN], weights[:TRAIN])
    validation = Matrix(x_NF[TRAIN:], y_N[TRAIN:], weights[TRAIN:])
    stops = early_stopping is not None
    grown = grow(task_of(kind), top, train, validation if stops else None, 3)
    if kind != "multiclass":
        assert (len(grown.roots) < ROUNDS) == stops
    model = BoostedTrees(task_of(kind).outputs)
    model.take(grown)
    want = np.asarray(WANTED[library](kind, x_NF, y_N, top, weights)).reshape(len(x_NF), -1)
    x = torch.from_numpy(x_NF).float()
    got = model(x)
    assert torch.equal(got, torch.from_numpy(want).float())
    # A checkpoint holds tensors alone, and a row's score does not depend on the other rows.
    again = BoostedTrees(task_of(kind).outputs)
    again.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})
    assert torch.equal(torch.cat([again(x[at : at + 1]) for at in range(0, 400, 23)]), got[::23])
    assert grown.gains(x.shape[1]).shape == (x.shape[1],)
    assert grown.gain.min() >= 0.0 < grown.gain.max()


@pytest.mark.parametrize(
    ("library", "loss"),
    [
        ("sklearn", {"kind": "mae"}),
        ("sklearn", {"kind": "quantile", "q": 0.8}),
        ("sklearn", {"kind": "poisson"}),
        ("lightgbm", {"kind": "mae"}),
        ("lightgbm", {"kind": "quantile", "q": 0.8}),
        ("lightgbm", {"kind": "huber", "delta": 0.5}),
        ("lightgbm", {"kind": "poisson"}),
    ],
    ids=str,
)
def test_losses_of_a_regression_lower_what_they_measure(
    library: Library, loss: dict[str, Any]
) -> None:
    x_NF, y_N = rows("regression")
    y_N = y_N / y_N.mean()
    task, top = task_of("regression", loss=loss), GbdtTop(kind="gbdt", library=library, trees=30)
    check_loss(task, library, "here")
    model = BoostedTrees(1)
    model.take(grow(task, top, Matrix(x_NF, y_N, None), None, 3))
    y, x = torch.from_numpy(y_N).float()[:, None], torch.from_numpy(x_NF).float()
    constants = [loss_fn(task)(torch.full_like(y, each), y) for each in np.linspace(-1, 3, 81)]
    assert loss_fn(task)(model(x), y) < min(constants)


def test_a_module_without_trees_gives_zeros_and_every_node_has_an_end() -> None:
    model = BoostedTrees(3)
    assert torch.equal(model(torch.ones(2, 5)), torch.zeros(2, 3))
    ring: dict[str, Any] = {
        "feature": np.zeros(2, np.int64),
        "threshold": np.zeros(2),
        "missing_left": np.zeros(2, bool),
        "child": np.array([[1, 1], [0, 0]]),
        "value": np.zeros(2),
        "gain": np.zeros(2),
        "roots": np.zeros((1, 1), np.int64),
        "baseline": np.zeros(1),
    }
    with pytest.raises(ValueError, match="cycle"):
        model.take(TreeArrays(**ring))


def test_missing_numbers_go_where_a_split_sends_them() -> None:
    """A split between present and missing numbers has no finite threshold in scikit-learn."""
    x_N = np.where(np.arange(200) % 2 == 0, np.nan, 1.0)
    top, y_N = GbdtTop(kind="gbdt", trees=5), (np.arange(200) % 2).astype(float)
    model = BoostedTrees(1)
    model.take(grow(task_of("binary"), top, Matrix(x_N[:, None], y_N, None), None, 0))

    def score(value: float) -> Tensor:
        found: Tensor = model(torch.tensor([[value]]))
        return found

    assert score(torch.nan) < 0 < score(1.0)
    assert score(3e38) == score(1.0)


def test_what_cannot_be_grown_is_one_error() -> None:
    top = GbdtTop(kind="gbdt")
    x_NF, y_N = rows("multiclass")
    with raises(InputError, Code.CONFIG_INVALID):
        grow(TaskSettings(kind="multiclass", classes=11), top, Matrix(x_NF, y_N, None), None, 0)
    huber = task_of("regression", loss={"kind": "huber", "delta": 1.0})
    with raises(InputError, Code.CONFIG_INVALID):
        check_loss(huber, "sklearn", "here")
    focal = task_of("binary", loss={"kind": "focal"})
    for library in WANTED:
        with raises(InputError, Code.CONFIG_INVALID):
            check_loss(focal, library, "here")
