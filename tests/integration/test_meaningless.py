"""What a recipe or a party's data say, and what would change nothing or be wrong: refused before
anything runs, with one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.memory import assembled, in_process
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.data.inputs.labels import Labels
from vfl_party.data.inputs.weights import check_weights, row_weights
from vfl_party.phases.course import Course

Table = dict[str, Any]
BINARY: Table = {"kind": "binary"}
SPLITNN: Table = {"kind": "splitnn", "epochs": 1, "batch_size": 16}
EVALUATE: Table = {"kind": "evaluate"}
CNN: Table = {"embedding_size": 8, "encoder": {"kind": "cnn", "channels": [4]}}


def tables(*phases: Table, **more: Any) -> Table:
    return cases.recipe(2) | {"phases": list(phases) or [SPLITNN]} | more


# -- columns that only the active party reads


@pytest.mark.parametrize(
    "keys",
    [{"weight": "w"}, {"event": "w"}, {"labels": ["w", "x"]}, {"group": "w"}],
    ids=lambda keys: next(iter(keys)),
)
def test_a_passive_party_weighs_and_labels_nothing(keys: Table, tmp_path: Path) -> None:
    path = tmp_path / "p1.csv"
    pd.DataFrame({"id": range(60), "w": 1, "x": 0, "c": np.arange(60.0)}).to_csv(path, index=False)
    with raises(InputError, Code.CONFIG_INVALID, names=("p1.csv", "data.drop")):
        assembled(tables(), "p1", {"source": str(path), "id": "id"} | keys)


def test_one_file_of_all_has_the_keys_of_all(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    frame = pd.DataFrame({"id": range(60), "y": 1, "w": 1, "a": 2.0, "b": np.arange(60.0)})
    frame.to_csv(path, index=False)
    view = {"scheme": "columns", "part": 1, "parts": 2}
    data = {"source": str(path), "id": "id", "label": "y", "weight": "w", "view": view}
    assert assembled(tables(), "p1", data).prepared.features is not None


# -- thresholds


@pytest.mark.parametrize(
    ("phases", "fine"),
    [
        ([SPLITNN, EVALUATE], True),
        ([SPLITNN, EVALUATE, SPLITNN | {"name": "more"}, EVALUATE | {"name": "last"}], True),
        ([SPLITNN, EVALUATE, EVALUATE | {"name": "tests", "splits": ["test"]}], True),
        ([SPLITNN, EVALUATE, SPLITNN | {"name": "more"}], False),
        (
            [
                SPLITNN,
                EVALUATE,
                SPLITNN | {"name": "more"},
                EVALUATE | {"name": "tests", "splits": ["test"]},
            ],
            False,
        ),
        ([EVALUATE, SPLITNN], False),
    ],
)
def test_a_threshold_is_chosen_for_the_model_that_is_kept(phases: list[Table], fine: bool) -> None:
    course = Course(Recipe.model_validate(tables(*phases, task=BINARY | {"threshold": "f1"})))
    if fine:
        course.check()
        return
    with raises(InputError, Code.CONFIG_INVALID, names="task.threshold"):
        course.check()


@pytest.mark.parametrize("test", [0.0, 0.2])
def test_a_rule_without_validation_rows_is_refused_before_training(test: float) -> None:
    """With no rows at all to evaluate, too: predictions would take 0.5 in silence."""
    data = cases.columns("sklearn:breast_cancer", 2, limit=60)
    made = tables(
        SPLITNN,
        EVALUATE,
        task=BINARY | {"threshold": {"rule": "rate", "rate": 0.2}},
        rows={"validation": 0.0, "test": test},
    )
    with raises(InputError, Code.CONFIG_INVALID, names=("task.threshold", "rows.validation")):
        assembled(made, "p0", data["p0"])


# -- weights


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_weights_are_finite(value: float) -> None:
    with raises(InputError, Code.DATA_INVALID):
        check_weights("rows.npz", "w", np.array([1.0, value, 2.0]))


@pytest.mark.parametrize(
    "column", [[1e300, 3e300, 2e300, 1.0], [1.7e308] * 4, [1e-320, 1e-320, 0.0, 1e-320]]
)
def test_only_the_proportions_of_weights_matter(column: list[float]) -> None:
    task = TaskSettings(kind="binary", class_weight={"1": 1e6})
    labels, targets = (
        Labels("binary", "rows.csv", (0, 1)),
        torch.tensor([[0.0], [1.0], [1.0], [0.0]]),
    )
    found = row_weights(
        task, labels, targets, torch.tensor(column, dtype=torch.float64), np.arange(4)
    )
    assert found is not None
    assert found.isfinite().all()
    assert found.mean().item() == pytest.approx(1.0)
    ratio = np.array(column) / np.max(column) * [1, 1e6, 1e6, 1]
    assert found.numpy() == pytest.approx(ratio / ratio.mean(), rel=1e-3)


def test_a_row_outside_training_does_not_weigh_without_end() -> None:
    labels, targets = Labels("binary", "rows.csv", (0, 1)), torch.tensor([[0.0], [1.0], [1.0]])
    column = torch.tensor([1.0, 2.0, 1e300], dtype=torch.float64)
    with raises(InputError, Code.DATA_INVALID, names=("rows.csv", "data.weight")):
        row_weights(TaskSettings(kind="binary"), labels, targets, column, np.arange(2))


# -- optimizers of parties that train nothing


@pytest.mark.parametrize(
    ("phase", "features", "fine"),
    [
        ({"kind": "contrastive", "rounds": 1}, False, False),
        ({"kind": "contrastive", "rounds": 1}, True, True),
        ({"kind": "fedonce", "epochs": 1}, True, False),
        ({"kind": "fedonce", "epochs": 1, "active": True}, True, True),
        ({"kind": "fedonce", "epochs": 1, "active": True}, False, False),
        (SPLITNN, False, True),
    ],
)
def test_an_optimizer_of_a_party_that_trains_nothing(
    phase: Table, features: bool, fine: bool
) -> None:
    made = cases.recipe(2, active_features=features)
    made["phases"] = [phase | {"optimizers": {"p0": {"lr": 0.1}}}]
    course = Course(Recipe.model_validate(made))
    if fine:
        course.check()
        return
    with raises(InputError, Code.CONFIG_INVALID, names="p0"):
        course.check()


# -- survival


@pytest.mark.parametrize("kind", ["survival", "ranking"])
@pytest.mark.parametrize("phase", [SPLITNN, {"kind": "head", "epochs": 1}], ids=["splitnn", "head"])
def test_one_row_has_nothing_to_be_compared_with(phase: Table, kind: str) -> None:
    more: Table = {"task": {"kind": kind}, "rows": {"split": "grouped"}}
    Course(Recipe.model_validate(tables(phase | {"batch_size": 2}, **more))).check()
    course = Course(Recipe.model_validate(tables(phase | {"batch_size": 1}, **more)))
    with raises(InputError, Code.CONFIG_INVALID, names="batch_size"):
        course.check()


def test_a_survival_task_needs_to_know_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "p0.csv"
    frame = pd.DataFrame({"id": range(60), "time": np.arange(60.0), "c": np.arange(60.0)})
    frame.to_csv(path, index=False)
    with raises(InputError, Code.DATA_INVALID, names=("p0.csv", "data.event")):
        assembled(
            tables(task={"kind": "survival"}),
            "p0",
            {"source": str(path), "id": "id", "label": "time"},
        )


# -- keys of augment

SELF_SUPERVISED: dict[str, Table] = {
    "contrastive": {"kind": "contrastive", "rounds": 1, "batch_size": 16},
    "fedhssl": {"kind": "fedhssl", "ssl": "simsiam", "rounds": 1, "batch_size": 16},
    "fedonce": {"kind": "fedonce", "objective": "contrastive", "epochs": 1, "batch_size": 16},
}
MIXED = [
    {"name": "p0", "role": "active"},
    {"name": "p1", "role": "passive", "encoder": {"kind": "cnn", "channels": [4]}},
]


@pytest.mark.parametrize("preset", ["paper", "released"])
@pytest.mark.parametrize("kind", [*SELF_SUPERVISED, "splitnn"])
@pytest.mark.parametrize(
    ("augment", "model", "fine"),
    [
        ({"crop_scale": [0.5, 1.0]}, {}, False),
        ({"corruption": 0.2, "blur": 0.5}, {}, False),
        ({"corruption": 0.2}, {}, True),
        ({"corruption": 0.2}, {"model": CNN}, False),
        ({"flip": 0.5, "corruption": 0.2}, {"model": CNN}, False),
        ({"flip": 0.5}, {"model": CNN}, True),
        ({"flip": 0.5, "corruption": 0.2}, {"parties": MIXED}, True),
    ],
)
def test_keys_of_augment_are_for_rows_that_a_party_has(
    augment: Table, model: Table, fine: bool, kind: str, preset: str
) -> None:
    phase = (SELF_SUPERVISED.get(kind) or SPLITNN) | {"augment": augment}
    made = tables(phase, **model, preset=preset)
    # FedOnce's active party learns nothing.
    data = cases.digits(2, limit=80)["p1"]
    if fine:
        assembled(made, "p1", data)
        return
    with raises(InputError, Code.CONFIG_INVALID):
        assembled(made, "p1", data)


def test_supervised_views_change_the_rows_of_each_party_that_has_them() -> None:
    made = tables(SPLITNN | {"augment": {"flip": 0.5}}, parties=MIXED)
    with raises(InputError, Code.CONFIG_INVALID, names=("augment.parties", "p0")):
        assembled(made, "p0", cases.digits(2, limit=80)["p0"])


def test_mocosfl_has_images_alone() -> None:
    made = cases.own_rows_recipe(2, augment={"corruption": 0.5})
    with raises(InputError, Code.CONFIG_INVALID):
        assembled(made, "p1", cases.own_rows(2)["p1"])


def test_what_is_refused_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    made = tables(SPLITNN, EVALUATE, SPLITNN | {"name": "more"}, task=BINARY | {"threshold": "f1"})
    with raises(InputError, Code.CONFIG_INVALID, names=("more", "task.threshold")):
        in_process(tmp_path / "run", made, cases.columns("sklearn:breast_cancer", 2, limit=60))
