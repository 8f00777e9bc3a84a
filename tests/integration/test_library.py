"""The library: recipes as values, frames in, a run out."""

from __future__ import annotations

import doctest
import logging
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from sklearn.datasets import load_breast_cancer

import vfl
import vfl.library.recipe
from tests.harness.errors import assert_names, raises
from tests.harness.here import one_launcher
from tests.harness.present import present
from vfl_common.errors import Code, InputError

TABLES: dict[str, Any] = {
    "name": "two",
    "task": {"kind": "binary"},
    "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
    "model": {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [6]}},
    "phases": [{"kind": "splitnn", "epochs": 2, "batch_size": 32}, {"kind": "evaluate"}],
}
RECIPE = vfl.Recipe.from_dict(TABLES)
ROWS = 120


def frame() -> pd.DataFrame:
    found = load_breast_cancer(as_frame=True).frame.head(ROWS)
    found.insert(0, "id", [f"c{number:04d}" for number in range(len(found))])
    return found


BANK, SHOP = (
    frame()[["id", "mean radius", "mean area", "target"]],
    frame()[["id", "mean texture", "worst area"]],
)


def run(bank: Any = BANK, shop: Any = SHOP, recipe: vfl.Recipe = RECIPE, **more: Any) -> vfl.Run:
    bank = bank if isinstance(bank, vfl.Data) else vfl.Data(bank, label="target")
    with one_launcher():
        return vfl.simulate(recipe, {"bank": bank, "shop": shop}, quiet=True, **more)


@pytest.fixture(scope="module")
def once() -> vfl.Run:
    return run()


# -- importing


def test_importing_costs_next_to_nothing_and_says_nothing() -> None:
    code = """
import sys
import vfl
heavy = {"torch", "grpc", "pydantic", "numpy", "pyarrow", "click", "rich", "pandas"} & sys.modules.keys()
assert not heavy, heavy
assert {*vfl.__all__, "Leaks", "leaks"} <= set(dir(vfl))
recipe = vfl.Recipe.load(sys.argv[1])
assert "torch" not in sys.modules
assert all(getattr(vfl, name) is not None for name in dir(vfl))
assert "torch" not in sys.modules
try:
    vfl.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
else:
    raise SystemExit("there is no such name")
"""
    example = Path(__file__).parents[2] / "examples" / "digits.toml"
    found = subprocess.run(
        [sys.executable, "-c", code, str(example)], capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_examples_in_docstrings_hold() -> None:
    found = doctest.testmod(vfl.library.recipe)
    assert (found.failed, found.attempted) == (0, 2)


# -- recipes


def test_a_recipe_is_a_value(tmp_path: Path) -> None:
    changed = RECIPE.replace(
        {"phases.splitnn.optimizer.lr": 0.5, "parties.shop.features": True}, seed=3
    )
    assert (RECIPE.settings.seed, changed.settings.seed) == (0, 3)
    assert changed.settings.phases[0].settings["optimizer"] == {"lr": 0.5}
    assert changed.replace({"phases.0.epochs": 7}).settings.phases[0].settings["epochs"] == 7
    assert changed != RECIPE
    assert vfl.Recipe.from_dict(TABLES) == RECIPE
    assert len({RECIPE, vfl.Recipe.from_dict(TABLES)}) == 1
    changed.save(tmp_path / "saved.toml")
    assert vfl.Recipe.load(str(tmp_path / "saved.toml")) == changed
    tables = RECIPE.to_dict()
    tables["phases"][0]["epochs"] = 9
    assert RECIPE.to_dict() == TABLES
    assert "&#x27;" not in RECIPE._repr_html_()
    assert "kind = &quot;binary&quot;" in RECIPE._repr_html_()
    assert RECIPE.parties == ("bank", "shop")


@pytest.mark.parametrize(
    "changes",
    [
        {"phases.splitn.epochs": 3},
        {"parties.9.features": True},
        {"seed.x": 3},
        {"sead": 3},
        {"seed": "three"},
    ],
)
def test_a_change_that_cannot_be_made(changes: dict[str, Any]) -> None:
    tables = {"seed": 0, **TABLES}
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.Recipe.from_dict(tables).replace(changes)


def test_numbers_of_numpy_are_numbers() -> None:
    odd = {"phases.splitnn.epochs": np.int64(3), "model.encoder.hidden": np.array([5])}
    assert RECIPE.replace(odd, seed=np.int64(2)) == RECIPE.replace(
        {"phases.splitnn.epochs": 3, "model.encoder.hidden": [5]}, seed=2
    )


@pytest.mark.parametrize("given", ["text", 3])
def test_what_is_no_recipe(given: Any) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.Recipe.from_dict(given)


def test_an_encoder_is_given_as_a_class_and_kept_out_of_files(tmp_path: Path) -> None:
    with raises(InputError, Code.MODEL_INVALID):
        RECIPE.replace({"model.encoder": torch.nn.Linear(2, 2)})
    made = RECIPE.replace(
        {"model.encoder": lambda spec, width: torch.nn.Linear(spec.shape[0], width)}
    )
    with raises(InputError, Code.MODEL_INVALID):
        made.save(tmp_path / "r")
    assert not (tmp_path / "r").exists()


# -- data


@pytest.mark.parametrize("kind", ["polars", "arrow", "indexed", "categories", "shuffled"])
def test_frames_of_every_kind_give_the_same_run(kind: str, once: vfl.Run) -> None:
    made: dict[str, Any] = {
        "polars": lambda table: pl.from_pandas(table),
        "arrow": lambda table: pa.Table.from_pandas(table, preserve_index=False),
        "indexed": lambda table: vfl.Data(table.set_index("id"), id="id"),
        "categories": lambda table: table.astype({"id": "category"}),
        "shuffled": lambda table: table.sample(frac=1.0, random_state=3),
    }
    shop = made[kind](SHOP)
    assert run(shop=shop).metrics == once.metrics


def test_ids_that_are_spelt_differently_give_the_same_run(once: vfl.Run) -> None:
    recipe = RECIPE.replace({"rows.id_rules": ["trim", "casefold"]})
    shop = SHOP.assign(id="  " + SHOP["id"].str.upper())
    # Three again, and one without an id.
    shop = pd.concat([shop, shop.tail(3), SHOP.head(1).assign(id=" ")])
    data = vfl.Data(shop, settings={"duplicates": "first"})
    found = run(shop=data, recipe=recipe)
    assert found.metrics == once.metrics
    new = {"bank": BANK.head(9).assign(id=BANK["id"].head(9) + " "), "shop": shop.head(9)}
    predicted = found.predict(new)
    # As the frame has them.
    assert predicted["id"] == list(new["bank"]["id"])
    assert (
        predicted["score_1"]
        == once.predict({"bank": BANK.head(9), "shop": SHOP.head(9)})["score_1"]
    )


def test_a_prediction_warns_of_numbers_in_another_unit(once: vfl.Run) -> None:
    shop = SHOP.assign(**{"mean texture": SHOP["mean texture"] * 100})
    with pytest.warns(UserWarning) as said:  # noqa: PT030 - its sentence is compared below
        predicted = once.predict({"bank": BANK, "shop": shop})
    assert [warning.filename for warning in said] == [__file__]
    assert_names(str(said[0].message), "shop", "120")
    assert len(predicted["id"]) == len(BANK)


@pytest.mark.parametrize("processes", [False, True])
def test_several_columns_are_one_id(processes: bool, once: vfl.Run) -> None:
    def parted(table: pd.DataFrame) -> pd.DataFrame:
        whole = table.assign(
            town=table["id"].str[:3], number=("1" + table["id"].str[3:]).astype(int)
        )
        return whole.drop(columns="id").sample(frac=1.0, random_state=2)

    ids = ["town", "number"]
    bank = vfl.Data(parted(BANK), id=tuple(ids), label="target")
    found = run(bank, vfl.Data(parted(SHOP).set_index(ids), id=ids), processes=processes)
    # The rows are in the same order.
    assert found.metrics == once.metrics
    new = {"bank": parted(BANK).head(9), "shop": parted(SHOP).head(9)}
    predicted = found.predict(new)
    assert list(predicted) == [
        "town",
        "number",
        "matched_town",
        "matched_number",
        "state",
        "score_1",
        "class",
    ]
    assert predicted["number"] == list(new["bank"]["number"])
    again = found.predict(
        {name: vfl.Data(table.to_dict("list"), id=ids) for name, table in new.items()}
    )
    assert again == predicted


def test_arrays_need_no_ids() -> None:
    rows = {"x": BANK[["mean radius", "mean area"]].to_numpy(), "y": BANK["target"].to_numpy()}
    images = np.random.default_rng(0).random((ROWS, 8, 8))
    found = run(vfl.Data(rows, label="y"), {"pixels": images})
    assert found.metrics["test"]["accuracy"] > 0.4
    named = run(vfl.Data({**rows, "id": BANK["id"].to_numpy()}, label="y", id="id"), SHOP)
    assert named.summary.steps == found.summary.steps


def test_paths_as_text_and_what_the_recipe_says_of_columns(tmp_path: Path, once: vfl.Run) -> None:
    BANK.to_csv(tmp_path / "bank.csv", index=False)
    SHOP.to_csv(tmp_path / "shop.csv", index=False)
    where = {
        "bank": {"source": "bank.csv", "id": "id", "label": "target"},
        "shop": {"source": "shop.csv", "id": "id"},
    }
    recipe = vfl.Recipe.from_dict(TABLES | {"simulate": {"parties": where}}, base=str(tmp_path))
    assert vfl.simulate(recipe, quiet=True).metrics == once.metrics
    elsewhere = vfl.simulate(recipe, {"shop": str(tmp_path / "shop.csv"), "bank": BANK}, quiet=True)
    assert elsewhere.metrics == once.metrics
    named = vfl.Data(tmp_path / "bank.csv", id="id", label="target")
    assert run(named, vfl.Data(tmp_path / "shop.csv", id="id")).metrics == once.metrics


@pytest.mark.parametrize(
    "data",
    [
        {"bank": vfl.Data(BANK, label="targt"), "shop": SHOP},
        {"bank": BANK, "shop": SHOP},
        {"bank": vfl.Data(BANK, label="target"), "shop": 3},
        {"bank": vfl.Data(BANK, label="target"), "shp": SHOP},
        {"bank": vfl.Data(BANK, label="target")},
        {"bank": vfl.Data(BANK, label="target"), "shop": vfl.Data(SHOP, label="x")},
        {"bank": vfl.Data(BANK, label="target"), "shop": pl.from_pandas(SHOP).lazy()},
        {
            "bank": vfl.Data(BANK, label="target"),
            "shop": SHOP.assign(age=["unknown", *range(ROWS - 1)]),
        },
        [BANK, SHOP],
        {"bank": vfl.Data(BANK, label="target"), "shop": SHOP["id"]},
        {"bank": vfl.Data(BANK, label="target"), "shop": {"x": [[1], [1, 2]]}},
        {"bank": vfl.Data(BANK, label="target"), "shop": SHOP.drop(columns="id")},
        {"bank": vfl.Data(BANK, label="target", settings={"drp": ["x"]}), "shop": SHOP},
        {"bank": vfl.Data(BANK, label="target"), "shop": SHOP.head(50)},
        {"bank": vfl.Data({"y": BANK["target"].to_numpy()}, label="z"), "shop": SHOP},
    ],
)
def test_data_that_cannot_be_used_are_one_sentence(data: dict[str, Any]) -> None:
    with raises(vfl.VflError, Code.CONFIG_INVALID, Code.DATA_INVALID, Code.ROWS_DIFFER):
        vfl.simulate(RECIPE, data, quiet=True)


# -- runs


def test_a_run_tells_the_bytes_at_which_a_metric_was_reached(once: vfl.Run) -> None:
    curves = once.curves()
    first, second, _ = curves["validation loss"]
    assert second < first, "it learns"
    sent = [once.bytes_to("loss", value) for value in (first, second, 0.0)]
    assert sent[2] is None
    assert sent[0] is not None
    assert sent[1] is not None
    # Twice as many epochs, and whatever begins a run.
    assert 1.5 * sent[0] < sent[1] < 2.5 * sent[0]
    links = [each for each in once.bytes.by_link if each.phase == "splitnn"]
    assert sent[1] == pytest.approx(sum(each.message_bytes for each in links), rel=0.2)
    # More is better. The phase that evaluates test rows sends more, which is left out.
    assert once.bytes_to("auc", 0.0, split="test") == sent[1]
    assert once.bytes_to("auc", 1.1, split="test") is None
    with raises(InputError, Code.CONFIG_INVALID):
        once.bytes_to("ndcg", 0.5)


def test_a_run_has_numbers_curves_and_pictures(once: vfl.Run, tmp_path: Path) -> None:
    assert set(once.metrics) == {"train", "validation", "test"}
    assert once.bytes.total.payload_bytes == once.summary.bytes.total.payload_bytes > 0
    curves = pd.DataFrame(once.curves())
    assert list(curves["phase"]) == ["splitnn", "splitnn", "evaluate"]
    assert list(curves["round"]) == [1, 2, 1]
    assert curves["test auc"].iloc[-1] == once.metrics["test"]["auc"]
    assert list(once.curves("shop")) == ["phase", "round"]
    with raises(InputError, Code.FILE_INVALID):
        once.curves("shp")
    once.plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert "shop" in once._repr_html_()
    assert "\x1b" not in once._repr_html_()
    assert "'accuracy'" in repr(once)


def test_a_run_that_is_kept_can_be_opened_again(tmp_path: Path, once: vfl.Run) -> None:
    kept = run(out=str(tmp_path))
    assert kept.folder.parent == tmp_path
    again = vfl.Run.load(str(kept.folder))
    assert again.metrics == once.metrics
    new = {"bank": BANK.drop(columns="target").head(9), "shop": SHOP.head(9)}
    predictions = again.predict(new)
    assert list(predictions) == ["id", "matched_id", "state", "score_1", "class"]
    assert predictions["id"] == list(BANK["id"].head(9))
    assert predictions == once.predict(new)
    assert set(predictions["class"]) <= {0, 1}
    mixed = again.predict(
        {"bank": new["bank"].iloc[::-1], "shop": new["shop"].sample(frac=1.0, random_state=1)}
    )
    # The order of the active party's rows.
    assert mixed == {name: values[::-1] for name, values in predictions.items()}
    with raises(InputError, Code.DATA_INVALID, names="shop"):
        again.predict({"bank": BANK})
    with raises(InputError, Code.FILE_INVALID):
        vfl.Run.load(tmp_path / "none")


@pytest.mark.parametrize("processes", [False, True])
def test_a_party_with_labels_only_takes_the_ids_of_another(processes: bool) -> None:
    recipe = RECIPE.replace({"parties.bank.features": False})
    trained = run(BANK[["id", "target"]], recipe=recipe, processes=processes)
    alone = trained.predict({"shop": SHOP.head(9)})
    assert alone["id"] == list(SHOP["id"].head(9))
    backwards = trained.predict({"bank": BANK[["id"]].head(9).iloc[::-1], "shop": SHOP.head(9)})
    assert backwards["score_1"] == alone["score_1"][::-1]
    with raises(InputError, Code.DATA_INVALID, names=("shpo", "bank")):
        trained.predict({"shpo": SHOP})


def test_ids_of_another_are_spelt_as_that_party_spells_them() -> None:
    shop = vfl.Data(SHOP.assign(id=SHOP["id"].str.upper()), settings={"id_rules": ["casefold"]})
    trained = run(BANK[["id", "target"]], shop, RECIPE.replace({"parties.bank.features": False}))
    assert trained.predict({"shop": shop.frame.head(9)})["id"] == list(shop.frame["id"].head(9))


@pytest.mark.parametrize("processes", [False, True])
def test_arrays_of_every_shape_and_name(processes: bool) -> None:
    bank: dict[str, Any] = {
        "id": BANK["id"].to_numpy(dtype=object),
        "file": BANK["mean area"].to_numpy(),
    }
    shop = {"id": list(SHOP["id"]), "z": SHOP[["mean texture", "worst area"]].to_numpy()}
    labelled = vfl.Data(bank | {"y": BANK["target"].to_numpy()}, id="id", label="y")
    trained = run(labelled, vfl.Data(shop, id="id"), processes=processes)
    new = {
        name: {key: values[:5] for key, values in of.items()}
        for name, of in (("bank", bank), ("shop", shop))
    }
    assert trained.predict(new)["id"] == list(BANK["id"].head(5))


def test_an_index_has_the_ids_of_processes_too(once: vfl.Run) -> None:
    assert run(shop=vfl.Data(SHOP.set_index("id"), id="id"), processes=True).metrics == once.metrics


def test_what_a_callback_does_to_torch_and_its_numbers_changes_no_run() -> None:
    recipe = RECIPE.replace({"model.encoder": {"kind": "mlp", "hidden": [6], "dropout": 0.5}})

    def disturb(each: vfl.Round) -> None:
        torch.manual_seed(5)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        for named in each.metrics.values():
            named["auc"] = 9.0

    assert run(recipe=recipe, on_round=disturb).metrics == run(recipe=recipe).metrics
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("mode", ["inference", "no_grad", "autocast", "meta"])
def test_the_caller_s_modes_change_no_run(mode: str, once: vfl.Run) -> None:
    modes: dict[str, Any] = {
        "inference": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "meta": torch.device("meta"),
    }
    with modes[mode]:
        found = run()
    assert found.metrics == once.metrics


def test_metrics_that_a_run_does_not_have_are_said_to_be_of_evaluate() -> None:
    found = run(recipe=RECIPE.replace({"phases": [TABLES["phases"][0]]}))
    with raises(KeyError, names=("test", "evaluate")):
        found.metrics["test"]
    assert found.metrics.get("test") is None


class Casting(torch.nn.Linear):
    """An encoder that casts by itself, whatever the recipe's precision."""

    def __init__(self, spec: Any, width: int) -> None:
        super().__init__(spec.shape[0], width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("changes", [{"model.precision": "bfloat16"}, {"model.encoder": Casting}])
def test_bfloat16_learns_also_inside_the_caller_s_autocast(changes: dict[str, Any]) -> None:
    recipe = RECIPE.replace(
        {"phases.splitnn.epochs": 30, "phases.splitnn.optimizer.lr": 0.01} | changes
    )
    found = run(recipe=recipe)
    weight = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = weight @ weight
        again = run(recipe=recipe)
        assert (weight @ weight).dtype == kept.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert found.metrics["train"]["loss"] < 0.3
    assert again.metrics == found.metrics
    for name in ("bank", "shop"):
        ours, theirs = found.model(name).encoder, again.model(name).encoder
        assert all(
            torch.equal(value, present(theirs).state_dict()[key])
            for key, value in present(ours).state_dict().items()
        )


def test_modules_of_one_recipe_are_not_those_of_another(tmp_path: Path) -> None:
    code = """
import torch
class Enc(torch.nn.Linear):
    def __init__(self, spec, width):
        super().__init__(spec.shape[0], width)
        torch.nn.init.constant_(self.weight, {value})
"""
    losses = []
    for value in ("0.0", "0.1"):
        (tmp_path / value).mkdir()
        (tmp_path / value / "enc.py").write_text(code.format(value=value))
        recipe = RECIPE.replace({"model.encoder": {"kind": "custom", "factory": "enc:Enc"}})
        found = run(recipe=vfl.Recipe.from_dict(recipe.to_dict(), tmp_path / value))
        losses.append(found.metrics["test"]["loss"])
        # Finds them again.
        assert len(found.predict({"bank": BANK.head(3), "shop": SHOP.head(3)})["id"]) == 3
    assert losses[0] != losses[1]
    assert "enc" not in sys.modules


def test_a_run_without_a_folder_goes_with_its_value() -> None:
    folder = run().folder
    import gc

    gc.collect()
    assert not folder.exists()


def test_a_run_is_quiet_if_asked_and_calls_back_each_round(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen: list[vfl.Round] = []
    run(on_round=seen.append)
    assert capfd.readouterr() == ("", "")
    assert [(each.party, each.round) for each in seen if each.phase == "evaluate"] == [
        ("bank", 1),
        ("shop", 1),
    ]
    assert [each.round for each in seen if (each.party, each.phase) == ("bank", "splitnn")] == [
        1,
        2,
    ]
    vfl.simulate(RECIPE, {"bank": vfl.Data(BANK, label="target"), "shop": SHOP})
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "round 2/2" in shown.err
    assert "waiting" not in shown.err


def test_what_a_callback_raises_ends_the_run_and_comes_out_as_it_is() -> None:
    def fail(each: vfl.Round) -> None:
        if each.party == "shop":
            raise KeyError("the callback's own")

    with raises(KeyError):
        run(on_round=fail)
    assert not [thread for thread in threading.enumerate() if thread.name in RECIPE.parties]


def test_a_forecast_is_what_the_run_sends(once: vfl.Run) -> None:
    found = vfl.forecast(RECIPE, {"bank": vfl.Data(BANK, label="target"), "shop": SHOP})
    sent = {name: count for name, count in once.bytes.by_phase.items() if name != "control"}
    assert found.by_phase == sent
    assert found.total == once.bytes.total
    assert vfl.forecast(TABLES, rows=ROWS).total == found.total
    assert found.seconds("10Mbit/s", "50ms") > found.seconds("100Mbit/s", "5ms") > 0
    assert (
        repr(found) == f"Forecast('two', 120 rows, {found.total.payload_bytes:,} bytes of tensors)"
    )
    assert "splitnn" in found._repr_html_()
    with raises(InputError, Code.CONFIG_INVALID, names="--rows"):
        vfl.forecast(RECIPE)


def test_a_study_has_a_row_a_run_and_a_picture(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"bank": vfl.Data(BANK, label="target"), "shop": SHOP}
    over: dict[str, list[Any]] = {
        "phases.splitnn.optimizer.lr": [0.001, 0.1],
        "model.combine": ["sum", "concat"],
    }
    found = vfl.study(RECIPE, over, data, seeds=[1, 2])
    assert (
        "run 8 of 8: phases.splitnn.optimizer.lr = 0.1, model.combine = concat, seed = 2"
        in capfd.readouterr().err
    )
    table = pd.DataFrame(found.columns())
    assert len(found) == len(table) == 8
    assert list(table.columns[:3]) == ["phases.splitnn.optimizer.lr", "model.combine", "seed"]
    alone = run(
        recipe=RECIPE.replace(
            {"phases.splitnn.optimizer.lr": 0.1, "model.combine": "concat"}, seed=2
        )
    )
    assert table["test loss"].iloc[-1] == alone.metrics["test"]["loss"]
    axes = found.plot("validation loss").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == [
        "model.combine = sum",
        "model.combine = concat",
    ]
    assert axes.get_xscale() == "log"
    mean = table.groupby(list(over))["validation loss"].mean()
    assert np.asarray(axes.get_lines()[0].get_ydata()).tolist() == pytest.approx(
        [mean[0.001, "sum"], mean[0.1, "sum"]]
    )
    found.plot().savefig(tmp_path / "study.png")
    assert found._repr_html_().count("<tr>") == 9
    assert repr(found) == "Study(8 runs over phases.splitnn.optimizer.lr, model.combine)"
    with raises(InputError, Code.CONFIG_INVALID):
        found.plot("validation acc")


def test_a_study_is_refused_before_its_first_run(capfd: pytest.CaptureFixture[str]) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("splitn", "splitnn")):
        vfl.study(
            RECIPE,
            {"model.embedding_size": [4], "phases.splitn.epochs": [1]},
            {"bank": BANK, "shop": SHOP},
        )
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.study(RECIPE, {"seed": []})
    # Each would make the same run again, and call it another.
    with raises(InputError, Code.CONFIG_INVALID, names="rows.folds"):
        vfl.study(RECIPE, {"fold": [1, 2]})
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.study(RECIPE, {"seed": [1, 2]}, seeds=[3])
    assert capfd.readouterr().err == ""


def test_a_run_within_a_run_is_refused() -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        run(on_round=lambda _: run())
    assert run().metrics


class Failing(torch.nn.Module):
    """An encoder as a cell of a notebook has it, which fails on its third batch."""

    def __init__(self, spec: Any, width: int) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(spec.shape[0], width), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 3:
            raise ZeroDivisionError("the third batch")
        out: torch.Tensor = self.layer(x)
        return out


class Wrong(torch.nn.Module):
    """An encoder that cannot be made."""

    def __init__(self, spec: Any, width: int) -> None:
        super().__init__()
        raise IndexError(f"{spec.shape}, {width}")


def test_an_encoder_that_cannot_be_made_is_told_with_its_own_line() -> None:
    with raises(
        InputError,
        Code.MODEL_INVALID,
        names=("model.encoder.factory", "tests.integration.test_library"),
    ):
        run(recipe=RECIPE.replace({"model.encoder": Wrong}))


@pytest.mark.parametrize("where", ["model.encoder", "parties.shop.encoder"])
def test_an_encoder_that_fails_is_told_with_its_own_line(where: str) -> None:
    with raises(vfl.VflError, Code.MODEL_INVALID, names="test_library") as caught:
        run(recipe=RECIPE.replace({where: Failing}))
    assert caught.value.code is vfl.Code.MODEL_INVALID
    told = "".join(traceback.format_exception(caught.value))
    assert 'raise ZeroDivisionError("the third batch")' in told


def test_a_class_of_a_cell_is_an_encoder_and_none_for_other_processes() -> None:
    def make() -> type[torch.nn.Module]:
        class Cell(torch.nn.Module):
            def __init__(self, spec: Any, width: int) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(spec.shape[0], width)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.layer(x)
                return out

        return Cell

    first, second = make(), make()
    for cell in (first, second, first):
        run(recipe=RECIPE.replace({"model.encoder": cell}))
    with raises(InputError, Code.MODEL_INVALID):
        run(recipe=RECIPE.replace({"model.encoder": first}), processes=True)


@pytest.mark.parametrize("processes", [False, True])
def test_a_file_is_no_folder_of_runs(processes: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(InputError, Code.FILE_INVALID):
        run(out=tmp_path / "file", processes=processes)
    with raises(InputError, Code.FILE_INVALID):
        run(out=tmp_path / "file" / "below", processes=processes)


def test_processes_compute_the_same_from_frames(tmp_path: Path, once: vfl.Run) -> None:
    data = {"bank": vfl.Data(BANK, label="target"), "shop": SHOP}
    # With a launcher of its own.
    found = vfl.simulate(RECIPE, data, quiet=True, processes=True, out=tmp_path)
    assert found.metrics == once.metrics
    assert found.bytes.by_phase["splitnn"] == once.bytes.by_phase["splitnn"]
    new = {"bank": BANK.drop(columns="target").head(9), "shop": SHOP.head(9)}
    assert found.predict(new) == once.predict(new)
    for path in (found.folder / "federation" / "data").iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_a_run_warns_of_it(caplog: pytest.LogCaptureFixture) -> None:
    parties = {"shop": {"source": "shop.csv", "id": "id", "label": "worst area"}}
    recipe = vfl.Recipe.from_dict(TABLES | {"simulate": {"parties": parties}})
    data = {"bank": vfl.Data(BANK, label="target"), "shop": pd.DataFrame(SHOP)}
    with caplog.at_level(logging.WARNING, "vfl_party.assembly.party"):
        run = vfl.simulate(recipe, data, quiet=True)
    (record,) = (each for each in caplog.records if getattr(each, "event", "") == "advice")
    assert_names(record.getMessage(), "data.label", "data.drop")
    new = {"bank": BANK.head(3), "shop": SHOP.head(3).drop(columns="worst area")}
    # The model does without that column.
    assert len(run.predict(new)["id"]) == 3
