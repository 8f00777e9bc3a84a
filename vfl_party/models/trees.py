"""Grows boosted trees with scikit-learn or LightGBM, and computes them as a module of tensors, so
that a checkpoint can store them without pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.config.models import GbdtTop
from vfl_common.config.task import (
    FocalSettings,
    HuberSettings,
    PluginLossSettings,
    QuantileSettings,
    TaskSettings,
)
from vfl_common.errors import Code, InputError

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TreeArrays:
    """Boosted trees as arrays over their M nodes. Both children of a leaf are the leaf itself.

    Args:
        feature: The column that each node compares, int64 [M].
        threshold: A row goes left if its value is at most this finite threshold, float64 [M].
        missing_left: Whether a missing value goes left, bool [M].
        child: The numbers of the left and the right child, int64 [M, 2].
        value: The number that each leaf adds to the score, float64 [M].
        gain: The decrease of the loss by each split, float64 [M]. Leaves have 0.
        roots: The root of the tree for each boosting round and output, int64 [rounds, O].
        baseline: The scores before the first tree, float64 [O].
    """

    feature: Places
    threshold: Doubles
    missing_left: npt.NDArray[np.bool_]
    child: Places
    value: Doubles
    gain: Doubles
    roots: Places
    baseline: Doubles

    def gains(self, columns: int) -> Doubles:
        """Returns the total gain of the splits on each column, float64 [columns]."""
        return np.bincount(self.feature, self.gain, minlength=columns).astype(np.float64)


def _build_empty(outputs: int) -> TreeArrays:
    numbers, places = np.zeros(0), np.zeros(0, np.int64)
    flags, children = np.zeros(0, bool), np.zeros((0, 2), np.int64)
    roots = np.zeros((0, outputs), np.int64)
    return TreeArrays(places, numbers, flags, children, numbers, numbers, roots, np.zeros(outputs))


class BoostedTrees(nn.Module):
    """A top model of boosted trees, float32 [B, F] -> float32 [B, O]. It begins without trees.

    Values may be missing (NaN). Scores are summed in float64, first the baseline and then one round
    after the other, in the order of scikit-learn and LightGBM. So on a CPU the score of a row
    equals the library's score, rounded to float32, and does not depend on the other rows of the
    batch.
    """

    feature: Tensor
    threshold: Tensor
    missing_left: Tensor
    child: Tensor
    value: Tensor
    gain: Tensor
    roots: Tensor
    baseline: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self._depth = 0
        for column in fields(TreeArrays):
            self.register_buffer(column.name, torch.empty(0))
        self.take(_build_empty(outputs))

    @torch.no_grad()
    def take(self, trees: TreeArrays) -> None:
        """Replaces the trees of this module."""
        device = self.feature.device
        for column in fields(TreeArrays):
            setattr(self, column.name, torch.from_numpy(getattr(trees, column.name)).to(device))
        self._depth = self._compute_depth()

    def _compute_depth(self) -> int:
        """Returns the maximum number of comparisons on the way to a leaf."""
        child_M2, nodes = self.child.cpu(), self.roots.cpu().reshape(-1)
        for depth in range(len(child_M2) + 1):
            inner = nodes[child_M2[nodes, 0] != nodes] if len(nodes) else nodes
            if not len(inner):
                return depth
            nodes = child_M2[inner].reshape(-1)
        raise ValueError("the nodes of the trees form a cycle")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Loads trees with any number of nodes, which changes the shapes of the buffers."""
        for column in fields(TreeArrays):
            value = state_dict.get(f"{prefix}{column.name}")
            if isinstance(value, Tensor):
                buffer = getattr(self, column.name)
                setattr(self, column.name, buffer.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._depth = self._compute_depth()

    def forward(self, z_BF: Tensor) -> Tensor:
        rows, columns = z_BF.shape
        z_BF, is_missing_BF = z_BF.double(), torch.isnan(z_BF)
        # A missing value becomes -inf at nodes where it goes left, and inf at the other nodes.
        low_BF = torch.where(is_missing_BF, -torch.inf, z_BF)
        values_BF = torch.cat([low_BF, torch.where(is_missing_BF, torch.inf, z_BF)], dim=1)
        place_M = self.feature + columns * (~self.missing_left).long()
        next_M = self.child.reshape(-1)
        node_BT = self.roots.reshape(1, -1).expand(rows, -1)
        for _ in range(self._depth):
            is_right_BT = values_BF.gather(1, place_M[node_BT]) > self.threshold[node_BT]
            node_BT = next_M[2 * node_BT + is_right_BT.long()]
        value_BRO = self.value[node_BT].reshape(rows, *self.roots.shape)
        baseline_B1O = self.baseline.expand(rows, 1, -1)
        # cumsum adds in order, but sum may add in any order.
        return torch.cat([baseline_B1O, value_BRO], dim=1).cumsum(dim=1)[:, -1].float()


# {loss of the recipe: its name in LightGBM}, and below its name in scikit-learn.
_OBJECTIVES = {"mae": "regression_l1", "poisson": "poisson"}
_LOSSES = {"mae": "absolute_error", "poisson": "poisson"}
INSTALL = "pip install lightgbm"


@dataclass(frozen=True)
class Matrix:
    """Training rows: features [N, F] with NaN for a missing value, targets [N] and weights [N].

    Targets are class numbers from 0, or the scaled values of a regression.
    """

    x: Doubles
    y: Doubles
    weights: Doubles | None


def lightgbm(where: str) -> Any:
    """Imports the optional package LightGBM. Raises InputError if it is not installed."""
    try:
        import lightgbm
    except (ImportError, OSError) as error:
        # LightGBM raises OSError if the shared library libgomp is missing.
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: gbdt needs LightGBM, which cannot be imported "
            f"({str(error).splitlines()[0]}). Install it: {INSTALL}.",
        ) from None
    return lightgbm


def objective(task: TaskSettings) -> dict[str, Any]:
    """Returns LightGBM's parameters for the task's loss.

    LightGBM supports neither the focal loss nor losses of plug-ins; see ``check_loss``.
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
    """Raises InputError if the library does not support the task's loss."""
    unsupported: tuple[type, ...] = (FocalSettings, PluginLossSettings)
    if library == "sklearn":
        unsupported = (*unsupported, HuberSettings)
    if task.loss is not None and isinstance(task.loss, unsupported):
        name = {"sklearn": "scikit-learn", "lightgbm": "LightGBM"}[library]
        raise InputError(
            Code.CONFIG_INVALID,
            f'{where}: {name} does not support this task.loss (got "{task.loss.kind}"). Use '
            "splitnn, or remove task.loss.",
        )


def grow(
    task: TaskSettings, top: GbdtTop, train: Matrix, validation: Matrix | None, seed: int
) -> TreeArrays:
    """Trains boosted trees with the settings ``top`` on the rows of ``train``.

    ``validation``: The rows for early stopping. On one machine the same rows, seed and library
    versions give the same trees. LightGBM also needs the same number of threads for this.

    Raises InputError if a class has no training row, or if LightGBM is not installed.
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
    train_trees = _train_sklearn if top.library == "sklearn" else _train_lightgbm
    return train_trees(task, top, train, validation, seed % 2**31)


def _train_sklearn(
    task: TaskSettings, top: GbdtTop, train: Matrix, validation: Matrix | None, seed: int
) -> TreeArrays:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    parameters: dict[str, Any] = {
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
            parameters |= {"loss": "quantile", "quantile": task.loss.q}
        elif task.loss is not None:
            parameters["loss"] = _LOSSES[task.loss.kind]
        model = HistGradientBoostingRegressor(**parameters)
    else:
        model = HistGradientBoostingClassifier(**parameters)
    validation_rows = {}
    if validation is not None:
        validation_rows = {"X_val": validation.x, "y_val": validation.y}
        validation_rows |= (
            {} if validation.weights is None else {"sample_weight_val": validation.weights}
        )
    with threadpool_limits(torch.get_num_threads(), "openmp"):
        model.fit(train.x, train.y, sample_weight=train.weights, **validation_rows)
    rounds = model._predictors
    if validation is not None:
        # The first score is that of the model without trees. A higher score is better.
        rounds = rounds[: int(np.argmax(model.validation_score_))]
    baseline = np.asarray(model._baseline_prediction, np.float64).reshape(-1)
    return _concatenate(
        [[_read_sklearn_tree(tree.nodes) for tree in trees] for trees in rounds], baseline
    )


_Tree = dict[str, npt.NDArray[Any]]


def _read_sklearn_tree(nodes: npt.NDArray[Any]) -> _Tree:
    is_leaf, node_numbers = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
    children = [
        np.where(is_leaf, node_numbers, nodes[side].astype(np.int64)) for side in ("left", "right")
    ]
    return {
        "feature": np.where(is_leaf, 0, nodes["feature_idx"]).astype(np.int64),
        # A split that only separates missing from present values has an infinite threshold.
        "threshold": np.minimum(nodes["num_threshold"], np.finfo(np.float64).max),
        "missing_left": nodes["missing_go_to_left"].astype(bool),
        "child": np.stack(children, axis=1),
        "value": np.where(is_leaf, nodes["value"], 0.0),
        "gain": np.where(is_leaf, 0.0, nodes["gain"]),
    }


def _train_lightgbm(
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
        # Otherwise LightGBM times two algorithms and takes the faster one, which changes rounding.
        "force_row_wise": True,
        "verbosity": -1,
    }
    if task.classes:
        parameters["num_class"] = task.classes
    data = lgb.Dataset(train.x, train.y, weight=train.weights)
    validation_sets, callbacks = [], []
    if validation is not None:
        validation_sets = [lgb.Dataset(validation.x, validation.y, data, weight=validation.weights)]
        callbacks = [lgb.early_stopping(top.early_stopping, verbose=False)]
    booster = lgb.train(parameters, data, top.trees, validation_sets, callbacks=callbacks)
    best_round = booster.best_iteration if validation is not None else booster.current_iteration()
    outputs = task.outputs
    trees = [
        _read_lightgbm_tree(tree["tree_structure"])
        for tree in booster.dump_model(num_iteration=best_round)["tree_info"]
    ]
    rounds = [trees[start : start + outputs] for start in range(0, len(trees), outputs)]
    return _concatenate(rounds, np.zeros(outputs))


def _read_lightgbm_tree(root: dict[str, Any]) -> _Tree:
    nodes = list(_yield_nodes(root))
    position_of = {id(node): place for place, node in enumerate(nodes)}

    def column(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
        return np.array([node.get(name, 0) for node in nodes], dtype)

    def goes_left(node: dict[str, Any]) -> bool:
        # If training had no missing value in a column, LightGBM treats a missing value as 0.
        handles_missing = node.get("missing_type") == "NaN"
        return bool(node["default_left"] if handles_missing else node.get("threshold", 0.0) >= 0.0)

    return {
        "feature": column("split_feature", np.int64),
        "threshold": column("threshold", np.float64),
        "missing_left": np.array([goes_left(node) for node in nodes], bool),
        "child": np.array(
            [
                [position_of[id(node.get(side, node))] for side in ("left_child", "right_child")]
                for node in nodes
            ],
            np.int64,
        ),
        "value": column("leaf_value", np.float64),
        "gain": column("split_gain", np.float64),
    }


def _yield_nodes(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the nodes of a tree, the root first."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [node[side] for side in ("right_child", "left_child") if side in node]


def _concatenate(rounds: list[list[_Tree]], baseline: Doubles) -> TreeArrays:
    """Returns the trees of all boosting rounds as one table of nodes."""
    trees = [tree for round_ in rounds for tree in round_]
    sizes = [len(tree["value"]) for tree in trees]
    root_numbers = np.cumsum([0, *sizes])[:-1].astype(np.int64)
    if not trees:
        trees = [{name: np.zeros((0, 2) if name == "child" else 0) for name in _KEYS}]
    joined = {name: np.concatenate([tree[name] for tree in trees]) for name in _KEYS}
    joined["child"] = joined["child"].astype(np.int64) + np.repeat(root_numbers, sizes)[:, None]
    return TreeArrays(
        feature=joined["feature"].astype(np.int64),
        threshold=joined["threshold"],
        missing_left=joined["missing_left"].astype(bool),
        child=joined["child"],
        value=joined["value"],
        gain=joined["gain"],
        roots=root_numbers[: sum(map(len, rounds))].reshape(len(rounds), len(baseline)),
        baseline=baseline,
    )


_KEYS = ("feature", "threshold", "missing_left", "child", "value", "gain")
