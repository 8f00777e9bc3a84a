"""Split training between processes gives the parameters of split training in one process: to 1e-12
in float64, and to 1e-6 in float32 for networks without pooling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness import cases, reference
from tests.harness.federation import Federation
from tests.harness.memory import in_memory
from tests.harness.preloaded import float64

# The largest absolute deviation on a CPU: in float64, where only an error of the program is larger,
# and in float32, where it includes rounding. No bound holds in float32 for max pooling: rounding may
# decide which of two pixels gets the gradient.
TOLERANCE, ROUNDING = 1e-12, 1e-6
# A network without ReLU and max pooling, whose gradient is continuous.
SMOOTH: dict[str, Any] = {"kind": "mlp", "hidden": [24], "activation": "gelu"}


Run = Callable[[Path, dict[str, Any], dict[str, Any]], dict[str, dict[str, Tensor]]]


def federated(
    folder: Path, recipe: dict[str, Any], data: dict[str, Any], *, fresh: bool = False
) -> dict[str, dict[str, Tensor]]:
    """{party: its weights and buffers} after a run of real processes over gRPC with mutual TLS."""
    with Federation(folder, recipe, data) as federation:
        federation.fresh |= fresh
        federation.start_all()
        summary = federation.finish()
        assert summary["interruptions"] == 0
        return {name: federation.parameters(name) for name in federation.names}


def largest_deviation(
    got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]
) -> float:
    """Over all parties, parameters and buffers, which must be the same ones."""
    assert got.keys() == want.keys()
    worst = 0.0
    for party, tensors in want.items():
        assert got[party].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert got[party][name].dtype == tensor.dtype, f"{party} {name}"
            difference = (got[party][name].double() - tensor.double()).abs()
            assert torch.isfinite(difference).all(), f"{party} {name}"
            worst = max(worst, difference.max().item() if difference.numel() else 0.0)
    return worst


def check(
    folder: Path,
    recipe: dict[str, Any],
    data: dict[str, Any],
    record: Any,
    run: Run = federated,
    **splits: Any,
) -> dict[str, dict[str, Tensor]]:
    """Runs both and compares; the federation's parameters. ``splits``: as for the reference."""
    got, want = run(folder, recipe, data), reference.train(recipe, data, **splits)
    worst = largest_deviation(got, want)
    record("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= (TOLERANCE if float64.is_on() else ROUNDING)
    return got


# All have each.
BETWEEN_PROCESSES = {
    ("concat", "mlp", 2),
    ("sum", "cnn", 4),
    ("mean", "cnn", 2),
    ("max", "mlp", 4),
    ("attention", "mlp", 4),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", ["concat", "sum", "mean", "max", "attention"])
@pytest.mark.parametrize("encoder", ["mlp", "cnn"])
@pytest.mark.parametrize("parties", [2, 4])
def test_parties_get_the_parameters_of_one_process(
    parties: int, encoder: str, rule: str, tmp_path: Path, record_property: Any
) -> None:
    recipe = cases.recipe(
        parties, model={"combine": rule, "encoder": {"kind": encoder}, "top": {"hidden": [16]}}
    )
    run = federated if (rule, encoder, parties) in BETWEEN_PROCESSES else in_memory
    check(tmp_path, recipe, cases.digits(parties), record_property, run)


@pytest.mark.parametrize("codec", ["bfloat16", "float16"])
def test_a_codec_is_the_rounding_of_what_crosses_and_nothing_else(
    codec: str, tmp_path: Path, record_property: Any
) -> None:
    recipe = cases.recipe(4, phase={"codec": codec})
    got = check(tmp_path, recipe, cases.digits(4), record_property)
    plain = reference.train(cases.recipe(4), cases.digits(4))
    # So the reference's rounding was needed.
    assert largest_deviation(got, plain) > 5 * ROUNDING


def test_the_installed_commands_do_as_well_in_float32(tmp_path: Path, record_property: Any) -> None:
    recipe = cases.recipe(2, model={"encoder": SMOOTH})
    check(tmp_path, recipe, cases.digits(2), record_property, partial(federated, fresh=True))


# Average pooling in place of ``cnn``'s max pooling, and GELU in place of ReLU.
AVERAGES = """
from torch import nn
class Averages(nn.Sequential):
    def __init__(self, spec, width):
        channels, height, width_ = spec.shape
        inputs = 4 * (height // 2) * (width_ // 2)
        convolution = nn.Conv2d(channels, 4, 3, padding=1)
        layers = convolution, nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(inputs, width)
        super().__init__(*layers)
"""


def test_smooth_convolutions_in_float32(
    tmp_path: Path, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "averages.py").write_text(AVERAGES)
    monkeypatch.syspath_prepend(tmp_path)
    encoder = {"kind": "custom", "factory": "averages:Averages"}
    optimizer = {"kind": "sgd", "lr": 0.1, "momentum": 0.9}
    recipe = cases.recipe(2, model={"encoder": encoder}, phase={"optimizer": optimizer})
    check(tmp_path, recipe, cases.digits(2), record_property, in_memory)
    monkeypatch.delitem(sys.modules, "averages")


@pytest.mark.usefixtures("float64")
def test_regression_where_the_active_party_has_labels_only(
    tmp_path: Path, record_property: Any
) -> None:
    recipe = cases.recipe(
        3,
        task={"kind": "regression"},
        active_features=False,
        model={"combine": "sum", "encoder": {"kind": "mlp", "hidden": [16], "activation": "tanh"}},
        phase={"optimizer": {"kind": "adagrad", "lr": 0.01, "weight_decay": 0.01}},
    )
    data = cases.columns("sklearn:diabetes", 2, limit=110, active_features=False)
    got = check(tmp_path, recipe, data, record_property)
    assert all(name.startswith("top.") for name in got[cases.ACTIVE])


@pytest.mark.usefixtures("float64")
def test_rows_are_divided_as_a_column_of_the_active_party_says(
    tmp_path: Path, record_property: Any
) -> None:
    rng = np.random.default_rng(3)
    ids, splits = (
        [f"r{row}" for row in range(90)],
        rng.choice(["train", "validation", "test"], 90, p=[0.6, 0.2, 0.2]),
    )
    x_NF = rng.normal(size=(90, 4)).round(4)
    labels = (x_NF.sum(axis=1) > 0).astype(int)
    own, other = tmp_path / "own.csv", tmp_path / "other.csv"
    lines = zip(ids, x_NF, labels, splits, strict=True)
    own.write_text(
        "id,a,b,y,part\n" + "".join(f"{i},{x[0]},{x[1]},{y},{s}\n" for i, x, y, s in lines)
    )
    other.write_text(
        "id,c,d\n"
        + "".join(f"{i},{x[2]},{x[3]}\n" for i, x in reversed([*zip(ids, x_NF, strict=True)]))
    )
    data = {
        "p0": {"source": str(own), "id": "id", "label": "y", "split": "part"},
        "p1": {"source": str(other), "id": "id"},
    }
    recipe = cases.recipe(2, task={"kind": "binary"}, rows={"split": "column"})
    in_order = np.array(splits)[np.argsort(ids)]
    held = {split: np.flatnonzero(in_order == split) for split in ("train", "validation", "test")}
    check(tmp_path, recipe, data, record_property, splits=held)


@pytest.mark.usefixtures("float64")
def test_binary_with_momentum_clipping_and_a_cosine_schedule(
    tmp_path: Path, record_property: Any
) -> None:
    optimizer = {
        "kind": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "clip_norm": 0.2,
        "schedule": "cosine",
    }
    recipe = cases.recipe(3, task={"kind": "binary"}, phase={"optimizer": optimizer})
    check(tmp_path, recipe, cases.columns("sklearn:breast_cancer", 3, limit=120), record_property)


@pytest.mark.usefixtures("float64")
def test_each_party_with_an_optimizer_of_its_own(tmp_path: Path, record_property: Any) -> None:
    """Steps, warm-up, decay of weights and clipping of one party do not touch another's."""
    own = {
        "p0": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "warmup_epochs": 2},
        "p1": {
            "kind": "sgd",
            "lr": 0.1,
            "schedule": "step",
            "step_epochs": 2,
            "factor": 0.3,
            "warmup_epochs": 1,
            "clip_norm": 0.1,
        },
    }
    phase = {
        "epochs": 6,
        "optimizer": {"kind": "adagrad", "schedule": "cosine", "warmup_epochs": 3},
        "optimizers": own,
    }
    recipe = cases.recipe(
        3, task={"kind": "binary"}, phase=phase, rows={"test": 0.2, "folds": 4, "fold": 3}
    )
    data = cases.columns("sklearn:breast_cancer", 3, limit=120)
    got = check(tmp_path, recipe, data, record_property)
    plain = cases.recipe(3, task={"kind": "binary"}, phase=phase | {"optimizers": {}})
    assert largest_deviation(got, reference.train(plain, data)) > 1e-3


@pytest.mark.usefixtures("float64")
def test_plateaus_lower_the_rate_of_every_party(tmp_path: Path, record_property: Any) -> None:
    falls = {"schedule": "plateau", "plateau_patience": 1, "factor": 0.3}
    phase = {
        "epochs": 12,
        "optimizer": {"kind": "sgd", "lr": 2.0, **falls},
        "optimizers": {"p1": {"kind": "adam", "lr": 0.05, **falls, "warmup_epochs": 2}},
        "early_stopping": {"patience": 4},
    }
    recipe = cases.recipe(2, task={"kind": "binary"}, phase=phase, rows={"validation": 0.3})
    data = cases.columns("sklearn:breast_cancer", 2, limit=100)
    got = check(tmp_path, recipe, data, record_property)
    constant = {"optimizer": {"kind": "sgd", "lr": 2.0}, "optimizers": {}}
    other = cases.recipe(
        2, task={"kind": "binary"}, phase=phase | constant, rows={"validation": 0.3}
    )
    # The rate does fall: with the first one the weights are others.
    assert largest_deviation(got, reference.train(other, data)) > 1e-3


@pytest.mark.usefixtures("float64")
def test_embeddings_of_different_widths(tmp_path: Path, record_property: Any) -> None:
    recipe = cases.recipe(4, model={"top": {"hidden": [16]}})
    recipe["parties"][0]["embedding_size"], recipe["parties"][2]["embedding_size"] = 3, 5
    got = check(tmp_path, recipe, cases.digits(4), record_property)
    assert got["p0"]["top.0.weight"].shape == (16, 3 + 8 + 5 + 8)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_early_stopping_goes_back_to_the_best_epoch(
    metric: str, tmp_path: Path, record_property: Any
) -> None:
    recipe = cases.recipe(
        2,
        task={"kind": "binary"},
        phase={
            "epochs": 12,
            "optimizer": {"kind": "sgd", "lr": 2.0},
            "early_stopping": {"patience": 2, "metric": metric},
        },
        rows={"validation": 0.3},
    )
    got = check(
        tmp_path, recipe, cases.columns("sklearn:breast_cancer", 2, limit=100), record_property
    )
    phase = {key: value for key, value in recipe["phases"][0].items() if key != "early_stopping"}
    last = reference.train(
        recipe | {"phases": [phase]}, cases.columns("sklearn:breast_cancer", 2, limit=100)
    )
    # The case does stop early: the last epoch's weights are others.
    assert largest_deviation(got, last) > 1e-3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("batch_norm", "optimizer"),
    [
        (False, {"kind": "adam"}),
        # Not Adam: a linear layer's bias before batch norm has a gradient of zero but for rounding,
        # and Adam divides rounding by its own size, so that the bias (and the running mean that
        # takes it up) is noise at any precision.
        (True, {"kind": "sgd", "lr": 0.1}),
    ],
)
def test_dropout_and_batch_norm_draw_as_in_one_process(
    batch_norm: bool, optimizer: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    encoder = {"kind": "mlp", "hidden": [24], "dropout": 0.3, "batch_norm": batch_norm}
    model = {"encoder": encoder, "top": {"hidden": [16], "dropout": 0.2}}
    recipe = cases.recipe(2, model=model, phase={"optimizer": optimizer})
    check(tmp_path, recipe, cases.digits(2), record_property)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rows", ["images", "columns"])
def test_views_of_batches_are_those_of_one_process(
    rows: str, tmp_path: Path, record_property: Any
) -> None:
    task = None if rows == "images" else {"kind": "binary"}
    augment = {"flip": 0.5} if rows == "images" else {"corruption": 0.3}
    model = {"encoder": {"kind": "cnn", "channels": [4]} if rows == "images" else {"kind": "mlp"}}
    data = (
        cases.digits(2)
        if rows == "images"
        else cases.columns("sklearn:breast_cancer", 2, limit=120)
    )
    recipe = cases.recipe(2, model=model, phase={"augment": augment}, task=task)
    run = federated if rows == "columns" else in_memory
    got = check(tmp_path, recipe, data, record_property, run)
    plain = reference.train(cases.recipe(2, model=model, task=task), data)
    assert largest_deviation(got, plain) > 1e-3


def test_two_runs_of_a_seed_are_equal_bit_for_bit(tmp_path: Path) -> None:
    recipe = cases.recipe(4, model={"combine": "max", "encoder": {"kind": "cnn"}})
    first, second = (
        federated(tmp_path / run, recipe, cases.digits(4)) for run in ("first", "second")
    )
    assert largest_deviation(first, second) == 0.0
    other = federated(
        tmp_path / "third", cases.recipe(4, seed=8, model=recipe["model"]), cases.digits(4)
    )
    assert largest_deviation(first, other) > 1e-3
