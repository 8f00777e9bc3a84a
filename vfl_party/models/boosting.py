"""Grows boosted trees with scikit-learn or LightGBM, and reads them as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.config.models import GbdtTop
from vfl_common.config.task import (
    FocalSettings,
    HuberSettings,
    PluginLossSettings,
    QuantileSettings,
    TaskSettings,
)
from vfl_common.errors import Code, InputError
from vfl_party.models.top.trees import Doubles, TreeArrays

# LightGBM's name of a loss, and scikit-learn's.
_OBJECTIVES = {"mae": "regression_l1", "poisson": "poisson"}
_LOSSES = {"mae": "absolute_error", "poisson": "poisson"}
INSTALL = "pip install lightgbm"


@dataclass(frozen=True)
class Matrix:
    """Rows to learn from: columns [N, F] with NaN for a missing number, targets [N], weights [N].

    Classes are numbers from 0; the values of a regression are scaled.
    """

    x: Doubles
    y: Doubles
    weights: Doubles | None


def lightgbm(where: str) -> Any:
    """Imports the optional package. Raises InputError with the command that installs it."""
    try:
        import lightgbm
    except (ImportError, OSError) as error:
        # OSError: libgomp, which its library needs, is missing.
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: gbdt needs LightGBM, which cannot be imported "
            f"({str(error).splitlines()[0]}). Install it: {INSTALL}.",
        ) from None
    return lightgbm


def objective(task: TaskSettings) -> dict[str, Any]:
    """Returns LightGBM's parameters of the task's loss; it has no focal loss, and none of
    plug-ins.
    """
    match task.loss:
        case None | FocalSettings() | PluginLossSettings():
            return {"objective": task.kind}
        case QuantileSettings():
            return {"objective": "quantile", "alpha": task.loss.q}
        case HuberSettings():
            return {"objective": "huber", "alpha": task.loss.delta}
        case _:
            return {"objective": _OBJECTIVES[task.loss.kind]}


def check_loss(task: TaskSettings, library: str, where: str) -> None:
    """Raises InputError if the library has no such loss."""
    lacks: tuple[type, ...] = (FocalSettings, PluginLossSettings)
    if library == "sklearn":
        lacks = (*lacks, HuberSettings)
    if task.loss is not None and isinstance(task.loss, lacks):
        name = {"sklearn": "scikit-learn", "lightgbm": "LightGBM"}[library]
        raise InputError(
            Code.CONFIG_INVALID,
            f'{where}: {name} does not support this task.loss (got "{task.loss.kind}"). Use '
            "splitnn, or remove task.loss.",
        )


def grow(
    task: TaskSettings, top: GbdtTop, train: Matrix, validation: Matrix | None, seed: int
) -> TreeArrays:
    """Grows the trees of ``top`` on ``train``. ``validation``: the rows of early stopping.

    The same rows, seed and versions of the libraries give the same trees on one machine;
    LightGBM's also need the same number of threads. Raises InputError if a class has no row, or if
    LightGBM is missing.
    """
    if task.kind in ("binary", "multiclass"):
        classes = task.classes or 2
        missing = sorted(set(range(classes)) - set(train.y.astype(int).tolist()))
        if missing:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: model.top: trees need training rows of all {classes} classes (got none "
                f"of {len(missing)}). Provide more training rows, or fewer classes.",
            )
    of = _by_sklearn if top.library == "sklearn" else _by_lightgbm
    return of(task, top, train, validation, seed % 2**31)


# -- trees of scikit-learn
# ----------------------------------------------------------------------


def _by_sklearn(
    task: TaskSettings, top: GbdtTop, train: Matrix, validation: Matrix | None, seed: int
) -> TreeArrays:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    own: dict[str, Any] = {
        "max_iter": top.trees,
        "learning_rate": top.lr,
        "max_leaf_nodes": top.leaves,
        "min_samples_leaf": top.min_rows,
        "l2_regularization": top.l2,
        "early_stopping": validation is not None,
        "n_iter_no_change": top.early_stopping or 1,
        "scoring": "loss",
        "random_state": seed,
    }
    if task.kind == "regression":
        if isinstance(task.loss, QuantileSettings):
            own |= {"loss": "quantile", "quantile": task.loss.q}
        elif task.loss is not None:
            own["loss"] = _LOSSES[task.loss.kind]
        model = HistGradientBoostingRegressor(**own)
    else:
        model = HistGradientBoostingClassifier(**own)
    more = {}
    if validation is not None:
        more = {"X_val": validation.x, "y_val": validation.y}
        more |= {} if validation.weights is None else {"sample_weight_val": validation.weights}
    with threadpool_limits(torch.get_num_threads(), "openmp"):
        model.fit(train.x, train.y, sample_weight=train.weights, **more)
    rounds = model._predictors
    if validation is not None:
        # Scores of the model without trees, then after each round; the largest is the best.
        rounds = rounds[: int(np.argmax(model.validation_score_))]
    baseline = np.asarray(model._baseline_prediction, np.float64).reshape(-1)
    return _concatenate([[_of_sklearn(tree.nodes) for tree in trees] for trees in rounds], baseline)


_Tree = dict[str, npt.NDArray[Any]]


def _of_sklearn(nodes: npt.NDArray[Any]) -> _Tree:
    is_leaf, itself = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
    sides = [np.where(is_leaf, itself, nodes[side].astype(np.int64)) for side in ("left", "right")]
    return {
        "feature": np.where(is_leaf, 0, nodes["feature_idx"]).astype(np.int64),
        # A split between present and missing numbers has an infinite threshold.
        "threshold": np.minimum(nodes["num_threshold"], np.finfo(np.float64).max),
        "missing_left": nodes["missing_go_to_left"].astype(bool),
        "child": np.stack(sides, axis=1),
        "value": np.where(is_leaf, nodes["value"], 0.0),
        "gain": np.where(is_leaf, 0.0, nodes["gain"]),
    }


# -- trees of LightGBM
# ----------------------------------------------------------------------


def _by_lightgbm(
    task: TaskSettings, top: GbdtTop, train: Matrix, validation: Matrix | None, seed: int
) -> TreeArrays:
    lgb = lightgbm("recipe: model.top")
    parameters = objective(task) | {
        "learning_rate": top.lr,
        "num_leaves": top.leaves,
        "min_data_in_leaf": top.min_rows,
        "lambda_l2": top.l2,
        "num_threads": torch.get_num_threads(),
        "seed": seed,
        "deterministic": True,
        # Otherwise it times both ways and takes the faster one, which changes rounding.
        "force_row_wise": True,
        "verbosity": -1,
    }
    if task.classes:
        parameters["num_class"] = task.classes
    data = lgb.Dataset(train.x, train.y, weight=train.weights)
    watched, callbacks = [], []
    if validation is not None:
        watched = [lgb.Dataset(validation.x, validation.y, data, weight=validation.weights)]
        callbacks = [lgb.early_stopping(top.early_stopping, verbose=False)]
    made = lgb.train(parameters, data, top.trees, watched, callbacks=callbacks)
    best_round = made.best_iteration if validation is not None else made.current_iteration()
    outputs = task.outputs
    trees = [
        _of_lightgbm(tree["tree_structure"])
        for tree in made.dump_model(num_iteration=best_round)["tree_info"]
    ]
    rounds = [trees[at : at + outputs] for at in range(0, len(trees), outputs)]
    return _concatenate(rounds, np.zeros(outputs))


def _of_lightgbm(root: dict[str, Any]) -> _Tree:
    nodes = list(_walk(root))
    at = {id(node): place for place, node in enumerate(nodes)}

    def column(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
        return np.array([node.get(name, 0) for node in nodes], dtype)

    def goes_left(node: dict[str, Any]) -> bool:
        # Where training has seen no missing number, LightGBM takes one as 0.
        is_known = node.get("missing_type") == "NaN"
        return bool(node["default_left"] if is_known else node.get("threshold", 0.0) >= 0.0)

    return {
        "feature": column("split_feature", np.int64),
        "threshold": column("threshold", np.float64),
        "missing_left": np.array([goes_left(node) for node in nodes], bool),
        "child": np.array(
            [
                [at[id(node.get(side, node))] for side in ("left_child", "right_child")]
                for node in nodes
            ],
            np.int64,
        ),
        "value": column("leaf_value", np.float64),
        "gain": column("split_gain", np.float64),
    }


def _walk(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the nodes of a tree, the root first."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [node[side] for side in ("right_child", "left_child") if side in node]


def _concatenate(rounds: list[list[_Tree]], baseline: Doubles) -> TreeArrays:
    """Returns trees as one table of nodes."""
    trees = [tree for round_ in rounds for tree in round_]
    sizes = [len(tree["value"]) for tree in trees]
    first = np.cumsum([0, *sizes])[:-1].astype(np.int64)
    if not trees:
        trees = [{name: np.zeros((0, 2) if name == "child" else 0) for name in _KEYS}]
    joined = {name: np.concatenate([tree[name] for tree in trees]) for name in _KEYS}
    joined["child"] = joined["child"].astype(np.int64) + np.repeat(first, sizes)[:, None]
    return TreeArrays(
        feature=joined["feature"].astype(np.int64),
        threshold=joined["threshold"],
        missing_left=joined["missing_left"].astype(bool),
        child=joined["child"],
        value=joined["value"],
        gain=joined["gain"],
        roots=first[: sum(map(len, rounds))].reshape(len(rounds), len(baseline)),
        baseline=baseline,
    )


_KEYS = ("feature", "threshold", "missing_left", "child", "value", "gain")
