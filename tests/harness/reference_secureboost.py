"""SecureBoost in one process: histogram boosting on joined columns, from XGBoost's formulas, in
float64.

It shares the tables, the splits and the drawn samples with the product, and nothing else: no
parties that exchange, no fixed point, no subtraction of histograms, no order but the plain one.
Candidates come in the order of the parties, then of the columns (numbers first), then of the cuts:
missing on the right, missing on the left. Gains that differ by less than a part in 10^10 are equal,
and the first one wins.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import derive_seed, draw_permutation, split_rows
from vfl_party.data import Labels, Preprocessor, load_table

Floats = npt.NDArray[np.float64]
TIE = 1e-10


@dataclass
class Column:
    """One column of one party. ``cells``: numbers with NaN, or category codes; ``cuts``: None for
    categories.
    """

    party: str
    place: int
    cells: npt.NDArray[Any]
    cuts: Floats | None


@dataclass
class Node:
    """``lefts``: which of all rows go left; ``value``: of a leaf."""

    value: float = 0.0
    party: str = ""
    place: int = -1
    lefts: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))
    children: tuple[Node, Node] | None = None

    def flat(
        self, level: int = 0, number: int = 0
    ) -> dict[tuple[int, int], tuple[str, int, float]]:
        """Returns {(level, number): (owner, column, value)} of this node and all below it."""
        found = {(level, number): (self.party, self.place, self.value)}
        for side, child in enumerate(self.children or ()):
            found |= child.flat(level + 1, 2 * number + side)
        return found

    def scores(self, rows: npt.NDArray[np.int64], out: Floats) -> None:
        """Writes each row's leaf value to ``out``."""
        if self.children is None:
            out[rows] = self.value
            return
        left = self.lefts[rows]
        self.children[0].scores(rows[left], out)
        self.children[1].scores(rows[~left], out)


@dataclass
class Result:
    """``trees``: round by round, class by class; ``scores``: [N, K] of all rows; ``splits``: as the
    product draws.
    """

    trees: list[Node]
    scores: Floats
    splits: dict[str, npt.NDArray[np.int64]]
    losses: list[float]
    kind: str
    y: Floats

    def loss(self, split: str) -> float:
        """Returns the mean loss of a split's rows."""
        return _loss(self.kind, self.scores[self.splits[split]], self.y[self.splits[split]])


def train(tables: dict[str, Any], data: dict[str, dict[str, Any]]) -> Result:
    """Trains on the joined columns of all parties."""
    recipe = Recipe.model_validate(tables)
    s = {
        "depth": 3,
        "leaves": None,
        "bins": 32,
        "learning_rate": 0.1,
        "lambda": 1.0,
        "min_child_weight": 1.0,
        "min_gain": 0.0,
        "row_sample": 1.0,
        "column_sample": 1.0,
        "goss": None,
        "early_stopping": None,
        "first_tree_own": False,
    } | recipe.phases[0].settings
    columns: dict[str, list[Column]] = {}
    for party in recipe.parties:
        settings = DataSettings(**data[party.name])
        table = load_table(settings, with_label=party.role == "active")
        r = recipe.rows
        splits = split_rows(
            recipe.seed,
            len(table.ids),
            validation=r.validation,
            test=r.test,
            aligned=r.aligned,
            labelled=r.labelled,
        )
        if party.role == "active":
            labels = Labels.fit(table.labels, recipe.task, splits["train"], source="reference")
            y = labels.encode(present(table.labels)).reshape(-1).double().numpy()
        if party.role == "passive" or party.features:
            columns[party.name] = _columns(
                table, settings, splits["train"], splits["local"], party.name, s["bins"]
            )
    return _boost(recipe, s, columns, y, splits)


def _columns(
    table: Any, settings: Any, train: Any, local: Any, party: str, bins: int
) -> list[Column]:
    found = list[Column]()
    for f in range(len(table.numeric_names)):
        cells = table.numeric_NF[:, f].astype(np.float64)
        found.append(Column(party, len(found), cells, _cuts(cells[train], bins)))
    if table.categorical is not None:
        fitted = Preprocessor.fit(table, local, one_hot=False, flatten=True, settings=settings)
        codes = present(fitted.transform(table).categories)
        for k in range(codes.shape[1]):
            cells = codes[:, k].numpy()
            unseen = ~np.isin(cells, cells[train])
            found.append(Column(party, len(found), np.where(unseen, -1, cells), None))
    return found


def _cuts(cells: Floats, bins: int) -> Floats:
    """Cuts halfway between values: all, or the next ones at or after each bins-th part of the
    sorted rows.
    """
    ordered = sorted(cells[~np.isnan(cells)].tolist())
    values = sorted(set(ordered))
    firsts: dict[float, int] = {}
    for place, value in enumerate(ordered):
        firsts.setdefault(value, place)
    if len(values) <= bins:
        after = values[1:]
    else:
        wanted = [k * len(ordered) // bins for k in range(1, bins)]
        after = sorted(
            {next((v for v in values if firsts[v] >= w), math.inf) for w in wanted}
            - {math.inf, values[0]}
        )
    return np.array([(values[values.index(v) - 1] + v) / 2 for v in after])


def _boost(
    recipe: Recipe, s: dict[str, Any], columns: dict[str, list[Column]], y: Floats, splits: Any
) -> Result:
    kind, k_all, train = recipe.task.kind, recipe.task.outputs, splits["train"]
    if kind == "binary":
        base = np.array([math.log(y[train].mean() / (1 - y[train].mean()))])
    elif kind == "regression":
        base = np.array([y[train].mean()])
    else:
        base = np.log(
            np.maximum(np.bincount(y[train].astype(int), minlength=k_all), 1e-3) / len(train)
        )
    scores, trees, losses = np.tile(base, (len(y), 1)), list[Node](), list[float]()
    best, best_round, phase = math.inf, 0, recipe.phases[0].name
    for round_ in range(s.get("trees", 100)):
        rows = train
        if s["row_sample"] < 1:
            drawn = draw_permutation(derive_seed(recipe.seed, phase, "rows", round_), len(train))
            rows = train[np.sort(drawn[: max(2, round(s["row_sample"] * len(train)))])]
        chosen = []
        for party, own in columns.items():
            if s["first_tree_own"] and round_ == 0 and party != recipe.active.name:
                continue
            order = draw_permutation(
                derive_seed(recipe.seed, phase, "columns", party, round_), len(own)
            )
            count = max(1, round(s["column_sample"] * len(own)))
            chosen += [
                own[n]
                for n in (sorted(order[:count]) if s["column_sample"] < 1 else range(len(own)))
            ]
        before, weights = scores.copy(), np.ones(len(y))
        if s["goss"] is not None:
            sizes = sum(abs(_derivatives(kind, before, y, k)[0]) for k in range(k_all))
            digest = hashlib.sha256(y[train].tobytes()).hexdigest()
            seed = derive_seed(derive_seed(recipe.seed, phase, "goss", digest), round_)
            kept, others = _goss(
                np.asarray(sizes)[train], s["goss"]["top"], s["goss"]["rest"], seed
            )
            rows = train[np.array(sorted(kept + others))]
            weights[train[np.array(others)]] = (len(train) - len(kept)) / len(others)
        for k in range(k_all):
            g, h = (weights * each for each in _derivatives(kind, before, y, k))
            tree = _Grower(s, chosen, g, h, train).grow(rows)
            update = np.zeros(len(y))
            tree.scores(np.arange(len(y)), update)
            scores[:, k] += update
            trees.append(tree)
        if s["early_stopping"] is not None:
            loss = _loss(kind, scores[splits["validation"]], y[splits["validation"]])
            losses.append(loss)
            if loss < best:
                best, best_round = loss, round_ + 1
            if round_ + 1 - best_round >= s["early_stopping"]:
                break
    if s["early_stopping"] is not None:
        trees, scores = trees[: best_round * k_all], np.tile(base, (len(y), 1))
        for number, tree in enumerate(trees):
            update = np.zeros(len(y))
            tree.scores(np.arange(len(y)), update)
            scores[:, number % k_all] += update
    return Result(trees, scores, splits, losses, kind, y)


def _goss(sizes: Floats, a: float, b: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns the a n rows with the largest gradients, and b n of the others; draws as the product
    does.
    """
    n, tie = (
        len(sizes),
        {
            int(row): at
            for at, row in enumerate(draw_permutation(derive_seed(seed, "ties"), len(sizes)))
        },
    )
    ranked = sorted(range(n), key=lambda row: (-float(np.float32(sizes[row])), tie[row]))
    kept, others = ranked[: round(a * n)], sorted(ranked[round(a * n) :])
    drawn = draw_permutation(derive_seed(seed, "rest"), len(others))[: round(b * n)]
    return kept, [others[at] for at in drawn]


def _derivatives(kind: str, scores: Floats, y: Floats, k: int) -> tuple[Floats, Floats]:
    if kind == "regression":
        return scores[:, 0] - y, np.ones(len(y))
    if kind == "binary":
        p = 1 / (1 + np.exp(-scores[:, 0]))
        return p - y, p * (1 - p)
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    p = e[:, k] / e.sum(axis=1)
    return p - (y == k), 2 * p * (1 - p)


def _loss(kind: str, scores: Floats, y: Floats) -> float:
    if kind == "regression":
        return float(((scores[:, 0] - y) ** 2).mean())
    if kind == "binary":
        return float(np.logaddexp(0, np.where(y == 1, -scores[:, 0], scores[:, 0])).mean())
    shifted = scores - scores.max(axis=1, keepdims=True)
    return float(
        (np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(y)), y.astype(int)]).mean()
    )


class _Grower:
    """Grows one tree level by level; rows are numbers of all rows."""

    def __init__(
        self, s: dict[str, Any], columns: list[Column], g: Floats, h: Floats, train: Any
    ) -> None:
        self.s, self.columns, self.g, self.h, self.train = s, columns, g, h, train

    def grow(self, rows: npt.NDArray[np.int64]) -> Node:
        root = Node()
        level, leaves, most = [(root, rows)], 1, self.s["leaves"] or 2 ** self.s["depth"]
        for _ in range(self.s["depth"]):
            found = [(self._best(of), node, of) for node, of in level]
            worth = [n for n, each in enumerate(found) if each[0] is not None]
            worth.sort(key=lambda n: -found[n][0][0])  # type: ignore[index]
            level, split = [], sorted(worth[: most - leaves])
            leaves += len(split)
            for n in split:
                best, node, of = found[n]
                _, column, node.lefts = present(best)
                node.party, node.place = column.party, column.place
                left = node.lefts[of]
                node.children = Node(), Node()
                level += [(node.children[0], of[left]), (node.children[1], of[~left])]
            level = [
                each for each in level if self.h[each[1]].sum() >= 2 * self.s["min_child_weight"]
            ]
        self._values(root, rows)
        return root

    def _values(self, node: Node, rows: npt.NDArray[np.int64]) -> None:
        if node.children is None:
            node.value = (
                -self.s["learning_rate"]
                * self.g[rows].sum()
                / (self.h[rows].sum() + self.s["lambda"])
            )
            return
        left = node.lefts[rows]
        self._values(node.children[0], rows[left])
        self._values(node.children[1], rows[~left])

    def _best(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[float, Column, npt.NDArray[np.bool_]] | None:
        best: tuple[float, Column, npt.NDArray[np.bool_]] | None = None
        parties = list(dict.fromkeys(column.party for column in self.columns))
        for party in parties:
            own: tuple[float, Column, npt.NDArray[np.bool_]] | None = None
            candidates = [
                each
                for column in self.columns
                if column.party == party
                for each in self._candidates(column, rows)
            ]
            top = max((gain for gain, _, _ in candidates), default=-math.inf)
            own = next((each for each in candidates if each[0] >= top - TIE * abs(top)), None)
            if own is None or own[0] <= self.s["min_gain"] + 1e-9:
                continue
            if best is None or own[0] > best[0] + TIE * abs(best[0]):
                best = own
        return best

    def _candidates(
        self, column: Column, rows: npt.NDArray[np.int64]
    ) -> list[tuple[float, Column, npt.NDArray[np.bool_]]]:
        cells, found = column.cells, []
        if column.cuts is None:
            present = [code for code in np.unique(cells[rows]).tolist() if code != -1]
            ratio = {
                c: self.g[rows[cells[rows] == c]].sum() / self.h[rows[cells[rows] == c]].sum()
                for c in present
            }
            order = sorted(present, key=lambda c: (ratio[c], c))
            for end in range(1, len(order)):
                low, high = ratio[order[end - 1]], ratio[order[end]]
                if high - low <= TIE * max(1.0, abs(low)):
                    continue
                inside = np.isin(cells[rows], order[:end])
                found.append(
                    (
                        self._gain(rows, inside),
                        column,
                        self._all(cells, order[:end], present, inside),
                    )
                )
            return found
        missing = np.isnan(cells)
        some = bool(missing[self.train].any())
        for side in (False, True) if some else (False,):
            for cut in column.cuts:
                left = (cells <= cut) | (missing & side)
                found.append(
                    (
                        self._gain(rows, left[rows]),
                        column,
                        self._unseen(left, missing, some, left[rows]),
                    )
                )
            if some and side:
                left = ~missing
                found.append((self._gain(rows, left[rows]), column, left))
        return found

    @staticmethod
    def _unseen(left: Any, missing: Any, some: bool, inside: Any) -> npt.NDArray[np.bool_]:
        """Sends a missing number of a column that had none in training where most rows go."""
        found: npt.NDArray[np.bool_] = (
            left if some else np.where(missing, 2 * inside.sum() >= len(inside), left)
        )
        return found

    @staticmethod
    def _all(
        cells: Any, chosen: list[int], present: list[int], inside: Any
    ) -> npt.NDArray[np.bool_]:
        """Sends categories that are not among the node's rows where most rows go."""
        most = 2 * inside.sum() >= len(inside)
        found: npt.NDArray[np.bool_] = np.where(
            np.isin(cells, present), np.isin(cells, chosen), most
        )
        return found

    def _gain(self, rows: npt.NDArray[np.int64], left: npt.NDArray[np.bool_]) -> float:
        sides = [rows[left], rows[~left], rows]
        g, h = [self.g[each].sum() for each in sides], [self.h[each].sum() for each in sides]
        if min(h[0], h[1]) < self.s["min_child_weight"] or min(h[0], h[1]) <= 0:
            return -math.inf
        left_, right, whole = (g[n] ** 2 / (h[n] + self.s["lambda"]) for n in range(3))
        return float(0.5 * (left_ + right - whole))
