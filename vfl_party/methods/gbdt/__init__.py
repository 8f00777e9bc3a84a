"""Gradient-boosted decision trees with LightGBM at the active party alone, on its own columns: a
baseline.

If a recipe has only one party, with all columns, the trees use all columns (``combined`` in a
study). Nothing is exchanged, a passive party does nothing, and the trees are discarded after the
phase.
"""

from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from vfl_common.config.base import Section
from vfl_common.config.models import PositiveInt, Rate
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.models.trees import check_loss, lightgbm, objective
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.method import Method, MethodFacts


class GbdtSettings(Section):
    """Settings of boosted trees at the active party. The defaults are LightGBM's, except the number
    of trees.
    """

    trees: PositiveInt = 500
    """The number of boosting rounds, LightGBM's ``num_iterations``. Each round grows one tree, or
    one per class in a multi-class task.
    """
    lr: Rate = 0.1
    """The learning rate."""
    leaves: Annotated[int, Field(ge=2, le=131_072)] = 31
    """The maximum number of leaves of a tree, LightGBM's ``num_leaves``."""
    min_rows: PositiveInt = 20
    """The minimum number of rows in a leaf, LightGBM's ``min_data_in_leaf``."""
    early_stopping: PositiveInt | None = None
    """The number of rounds without a lower validation loss after which growth stops. The trees up
    to the best round are kept. Default: off.
    """
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate."""


class ActiveGbdt(Phase):
    """Grows all trees in one round and reports their metrics."""

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: GbdtSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        where = f"recipe: phases: {name}"
        check_loss(party.recipe.task, "lightgbm", where)
        self._lightgbm = lightgbm(where)
        if party.rows.features is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: {party.name} has no features to grow trees on. Give it features, or "
                "remove the phase.",
            )
        if len(party.rows.get("train")) == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: there are no labelled training rows. Add rows with labels to the "
                "training split.",
            )
        if settings.early_stopping is not None and len(party.rows.get("validation")) == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: early_stopping needs validation rows (got none). Set rows.validation "
                "or data.split.",
            )

    def run_round(self, _round: int) -> RoundReport:
        party, settings, lgb = self._party, self._settings, self._lightgbm
        x_NF, categorical = self._collect_columns()
        _, targets = party.rows.need_labels()
        weights = party.rows.compute_weights(party.rows.get("train"))
        w_N = None if weights is None else weights.cpu().numpy()
        y_N = targets.reshape(-1).cpu().numpy()

        def make_dataset(rows: Rows, reference: Any = None) -> Any:
            weights_of_rows = None if w_N is None else w_N[rows]
            return lgb.Dataset(
                x_NF[rows],
                y_N[rows],
                reference,
                weight=weights_of_rows,
                categorical_feature=categorical,
            )

        train = make_dataset(party.rows.get("train"))
        callbacks, validation_sets = [self._tick], []
        if settings.early_stopping is not None:
            validation_sets = [make_dataset(party.rows.get("validation"), train)]
            callbacks.append(lgb.early_stopping(settings.early_stopping, verbose=False))
        trees = lgb.train(
            self._get_parameters(), train, settings.trees, validation_sets, callbacks=callbacks
        )
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        for split in settings.splits:
            rows = party.rows.get(split)
            if len(rows):
                predictions[split] = rows, self._compute_outputs(trees, x_NF[rows])
        rounds = (
            trees.best_iteration
            if settings.early_stopping is not None
            else trees.current_iteration()
        )
        note = f"{self.name}: {rounds} of at most {settings.trees} rounds of boosting"
        return RoundReport(
            0, compute_metrics(party, predictions), note=note, predictions=predictions
        )

    def _get_parameters(self) -> dict[str, Any]:
        party, settings = self._party, self._settings
        classes = {"num_class": party.recipe.task.classes} if party.recipe.task.classes else {}
        return classes | {
            **objective(party.recipe.task),
            "learning_rate": settings.lr,
            "num_leaves": settings.leaves,
            "min_data_in_leaf": settings.min_rows,
            "num_threads": torch.get_num_threads(),
            "seed": derive_seed(party.recipe.seed, self.name) % 2**31,
            "deterministic": True,
            # Otherwise LightGBM times two algorithms and uses the faster one, which changes
            # rounding.
            "force_row_wise": True,
            "verbosity": -1,
        }

    def _collect_columns(self) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Returns all rows as the encoder gets them, [N, F], with images as rows of pixels, and the
        positions of the categorical columns.
        """
        features = self._party.rows.need_features()
        x_NF = features.x.flatten(1).cpu().numpy()
        if features.categories is None:
            return x_NF, []
        width = x_NF.shape[1]
        joined = np.concatenate(
            [x_NF, features.categories.cpu().numpy().astype(np.float32)], axis=1
        )
        return joined, list(range(width, joined.shape[1]))

    def _compute_outputs(self, trees: Any, x_NF: npt.NDArray[np.float32]) -> Tensor:
        """Returns the outputs [N, O] that ``evaluate`` expects: logits, or scaled values."""
        raw = trees.predict(x_NF, raw_score=True, num_threads=torch.get_num_threads())
        return torch.from_numpy(np.asarray(raw)).reshape(len(x_NF), -1)

    def _tick(self, state: Any) -> None:
        self._party.hooks.tick(self.name, 0, 1, state.iteration + 1, state.end_iteration)


class PassiveGbdt(Phase):
    """Does nothing at a passive party."""

    alone_from = 0

    def __init__(self, _party: Party, name: str, _settings: GbdtSettings) -> None:
        self.name, self.rounds = name, 1

    def run_round(self, _round: int) -> RoundReport:
        return RoundReport(0)


class Gbdt(Method[GbdtSettings]):
    """Boosted trees: only the active party trains."""

    def facts(self, settings: GbdtSettings) -> MethodFacts:
        _ = settings
        return MethodFacts(follows=frozenset({"loss", "class_weight", "weight"}))

    def traffic(self, party: Party, phase: str, settings: GbdtSettings) -> Traffic:
        _ = party, phase, settings
        return Traffic()


METHOD = Gbdt(GbdtSettings, ActiveGbdt, PassiveGbdt, model="none")
