"""A trained party's models by themselves: the same numbers as in the run, by name, with the way to
prepare rows.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import polars as pl
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.present import present
from tests.integration.test_library import BANK, RECIPE, SHOP, TABLES, run
from vfl.cli import cli
from vfl.library.model import Model
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_party.predict import trained

NEW = {"bank": BANK.drop(columns="target").tail(40), "shop": SHOP.tail(40)}


@pytest.fixture(scope="module")
def once() -> vfl.Run:
    return run()


def test_two_models_compute_what_the_run_predicts(once: vfl.Run) -> None:
    bank, shop = once.model(), once.model("shop")
    assert (bank.party, shop.party, bank.run_id) == ("bank", "shop", once.folder.name)
    assert bank.encoder is not None
    assert shop.top is None
    assert bank.classes == (0, 1)
    with torch.no_grad():
        z_BD = torch.cat(
            [
                bank.encoder(*bank.prepare(NEW["bank"])),
                present(shop.encoder)(*shop.prepare(NEW["shop"])),
            ],
            dim=1,
        )
        scores = present(bank.top)(z_BD).double().sigmoid().float().flatten()
    assert scores.tolist() == once.predict(NEW)["score_1"]
    assert torch.equal(z_BD, torch.cat([bank.embed(NEW["bank"]), shop.embed(NEW["shop"])], dim=1))
    assert repr(bank) == f"Model('bank' of {once.folder.name}: encoder, top)"


def test_an_exported_file_makes_the_same_model_elsewhere(once: vfl.Run, tmp_path: Path) -> None:
    path = tmp_path / "bank.safetensors"
    once.model("bank").save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = vfl.Model.load(str(path), "bank")
    assert torch.equal(found.embed(NEW["bank"]), once.model("bank").embed(NEW["bank"]))
    assert found.classes == (0, 1)
    with safe_open(path, framework="pt") as file:
        assert {"encoder.1.weight", "encoder.3.bias", "top.0.weight"} <= set(file.keys())
        about = json.loads(file.metadata()["about"])
    assert (about["party"], about["recipe_digest"]) == ("bank", once.summary.recipe_digest)
    assert about["preprocessor"]["numeric_names"] == ["mean radius", "mean area"]
    with raises(InputError, Code.FILE_INVALID, names="bank.safetensors"):
        found.save(path)
    with raises(InputError, Code.FILE_INVALID, names="bank.pt"):
        found.save(tmp_path / "bank.pt")
    with raises(InputError, Code.FILE_INVALID, names=("bank.safetensors", "shop")):
        vfl.Model.load(path, "shop")


def test_two_onnx_files_and_a_third_compute_what_the_run_predicts(
    once: vfl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NEW:
        args = ["export", "model", str(once.folder), "--party", name, "--format", "onnx"]
        done = CliRunner().invoke(cli, args)
        assert done.exit_code == 0, done.output
    assert done.output == "shop.onnx\nshop.json\n"

    def computed(file: str, inputs: dict[str, Any]) -> Any:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return session.run(None, inputs)[0]

    z = {}
    for name, rows in NEW.items():
        about = json.loads(Path(f"{name}.json").read_text())[f"{name}.onnx"]
        columns = about["inputs"]["numbers"]["columns"]
        numbers = rows[columns].to_numpy(np.float32)
        z[f"embedding of {name}"] = computed(f"{name}.onnx", {"numbers": numbers})
        want = once.model(name).embed(rows).numpy()
        np.testing.assert_allclose(z[f"embedding of {name}"], want, rtol=0, atol=1e-5)
    scores = 1 / (1 + np.exp(-computed("bank-top.onnx", z).flatten()))
    np.testing.assert_allclose(scores, once.predict(NEW)["score_1"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["polars", "arrow", "arrays", "more columns", "shuffled"])
def test_rows_of_every_kind_in_their_own_order(kind: str, once: vfl.Run) -> None:
    shop, rows = once.model("shop"), NEW["shop"]
    made: dict[str, Any] = {
        "polars": lambda: pl.from_pandas(rows),
        "arrow": lambda: pl.from_pandas(rows).to_arrow(),
        "arrays": lambda: {name: rows[name].to_numpy() for name in rows},
        "more columns": lambda: rows.assign(text="x", when=pd.Timestamp(0)),
        "shuffled": lambda: rows.sample(frac=1.0, random_state=1),
    }
    found, want = shop.embed(made[kind]()), shop.embed(rows)
    if kind == "shuffled":
        order = rows.reset_index(drop=True).sample(frac=1.0, random_state=1).index
        want = want[torch.tensor(order.to_numpy())]
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


def test_categories_and_missing_numbers_are_coded_as_in_training() -> None:
    shop = SHOP.assign(
        region=np.resize(["north", "south", "east"], len(SHOP)), code=np.resize([3, 5], len(SHOP))
    )
    shop.loc[shop.index[:7], "worst area"] = None
    settings = {"missing": "mean", "categorical": ["code"]}
    recipe = RECIPE.replace({"parties.shop.encoder": {"kind": "tabular", "hidden": [6]}})
    found = run(shop=vfl.Data(shop, id="id", settings=settings), recipe=recipe)
    model, new = found.model("shop"), shop.head(9)
    values, codes = model.prepare(new)
    assert (values.shape, codes.shape, codes.dtype) == ((9, 2), (9, 2), torch.int64)
    assert torch.equal(model.prepare({name: new[name].to_numpy() for name in new})[1], codes)
    z_BD = torch.cat([found.model("bank").embed(BANK.head(9)), model.embed(new)], dim=1)
    top = present(found.model("bank").top)
    scores = found.predict({"bank": BANK.drop(columns="target").head(9), "shop": new})["score_1"]
    assert top(z_BD).sigmoid().flatten().tolist() == pytest.approx(scores)


def test_images_and_a_party_with_labels_only(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((len(BANK), 8, 8)).astype(np.float32)
    tables = TABLES | {
        "parties": [TABLES["parties"][0] | {"features": False}, TABLES["parties"][1]]
    }
    cnn = vfl.Recipe.from_dict(tables).replace({"model.encoder": {"kind": "cnn", "channels": [2]}})
    found = run(vfl.Data({"y": BANK["target"].to_numpy()}, label="y"), {"pixels": pixels}, cnn)
    shop, bank = found.model("shop"), found.model("bank")
    assert shop.prepare(pixels)[0].shape == (len(BANK), 1, 8, 8)
    assert bank.top is not None
    assert bank.encoder is None
    shop.save(tmp_path / "shop.safetensors")
    assert torch.equal(
        vfl.Model.load(tmp_path / "shop.safetensors").embed(pixels), shop.embed(pixels)
    )
    bank.save(tmp_path / "bank.safetensors")
    assert vfl.Model.load(tmp_path / "bank.safetensors").encoder is None
    with raises(InputError, Code.DATA_INVALID, names="bank"):
        bank.embed(BANK)
    with raises(InputError, Code.DATA_INVALID, names="shop"):
        shop.embed(pixels[:, :4, :4])


@pytest.mark.parametrize(
    "rows",
    [SHOP.drop(columns="worst area"), SHOP.assign(**{"worst area": "many"}), SHOP.head(0), 3],
)
def test_rows_that_cannot_be_used_are_one_sentence(rows: Any, once: vfl.Run) -> None:
    with raises(InputError, Code.DATA_INVALID, names="shop"):
        once.model("shop").prepare(rows)


def test_what_is_no_model_is_one_sentence(once: vfl.Run, tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("text")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name in ("text", "other"):
        with raises(InputError, Code.FILE_INVALID):
            vfl.Model.load(tmp_path / f"{name}.safetensors")
    with raises(InputError, Code.FILE_INVALID):
        vfl.Model.load(tmp_path / "none")
    with raises(InputError, Code.FILE_INVALID):
        vfl.Model.load(tmp_path)
    with raises(InputError, Code.FILE_INVALID):
        once.model("shp")


OWN = """
import torch
class Enc(torch.nn.Linear):
    def __init__(self, spec, width):
        super().__init__(spec.shape[0], width)
"""


def test_encoders_of_one_s_own_are_found_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_enc.py").write_text(OWN)
    tables = RECIPE.replace(
        {"model.encoder": {"kind": "custom", "factory": "own_enc:Enc"}}
    ).to_dict()
    found = run(recipe=vfl.Recipe.from_dict(tables, tmp_path))
    shop = found.model("shop")
    assert type(shop.encoder).__name__ == "Enc"
    assert vfl.Run.load(found.folder).predict(NEW)["score_1"] == found.predict(NEW)["score_1"]
    shop.save(tmp_path / "shop.safetensors")
    with raises(InputError, Code.MODEL_INVALID, names=("own_enc:Enc", "model.encoder.factory")):
        vfl.Model.load(tmp_path / "shop.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch.equal(
        vfl.Model.load(tmp_path / "shop.safetensors").embed(NEW["shop"]), shop.embed(NEW["shop"])
    )


def test_a_top_model_of_a_cell_predicts_after_attention(tmp_path: Path) -> None:
    class Deep(torch.nn.Sequential):
        def __init__(self, in_features: int, outputs: int) -> None:
            first = torch.nn.Linear(in_features, 5)
            super().__init__(first, torch.nn.Tanh(), torch.nn.Linear(5, outputs))

    recipe = RECIPE.replace({"model.top": Deep, "model.combine": "attention"})
    found = run(recipe=recipe)
    bank, shop = found.model("bank"), found.model("shop")
    z_BKD = torch.stack([bank.embed(NEW["bank"]), shop.embed(NEW["shop"])], dim=1)
    with torch.no_grad():
        scores = present(bank.top)(z_BKD).double().sigmoid().float().flatten().tolist()
    assert scores == found.predict(NEW)["score_1"]
    bank.save(tmp_path / "bank.safetensors")
    again = present(vfl.Model.load(tmp_path / "bank.safetensors").top)
    with torch.no_grad():
        assert again(z_BKD).double().sigmoid().float().flatten().tolist() == scores
    # It is in no file, and other processes cannot import it.
    with raises(InputError, Code.MODEL_INVALID):
        recipe.save(tmp_path / "recipe.toml")
    with raises(InputError, Code.MODEL_INVALID):
        run(recipe=recipe, processes=True)
    with raises(InputError, Code.MODEL_INVALID):
        RECIPE.replace({"model.top": Deep(4, 1)})


def test_a_top_model_that_fails_is_told_with_its_own_line() -> None:
    class Failing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 2:
                raise ZeroDivisionError("the first batch")
            return super().forward(x)

    with raises(InputError, Code.MODEL_INVALID, names=("test_trained", "bank")):
        run(recipe=RECIPE.replace({"model.top": Failing}))


def test_two_encoders_of_one_party_and_an_encoder_of_the_party_file(tmp_path: Path) -> None:
    """FedHSSL trains two encoders; a party's own settings replace the recipe's."""
    phase = {
        "kind": "fedhssl",
        "rounds": 1,
        "batch_size": 24,
        "ssl": "simsiam",
        "projector": [8, 8, 8],
    }
    phases = [
        {**phase, "predictor": 8, "cross": True, "local": True},
        {"kind": "splitnn", "epochs": 1},
    ]
    recipe = Recipe.model_validate(cases.recipe(2, rows={"aligned": 0.5}) | {"phases": phases})
    data = {name: DataSettings.model_validate(each) for name, each in cases.digits(2).items()}
    run_in_process(recipe, data, tmp_path / "run")
    found = Model.load(tmp_path / "run", "p1")
    assert {"cross", "local"} == {name for name, _ in present(found.encoder).named_children()}
    folder = RunFolder(tmp_path / "run" / "p1", "run")
    folder.note(encoder={"kind": "mlp", "hidden": [3]})
    with raises(InputError, Code.CHECKPOINT_INVALID):
        trained.load(folder.path, None)
    folder.note(encoder={"kind": "none"})
    with raises(InputError, Code.CONFIG_INVALID, names=("none", "mobilenet_v2")):
        trained.load(folder.path, None)
    folder.note(encoder={"kind": 3})
    with raises(InputError, Code.FILE_INVALID, names=("run.json", "p1")):
        trained.load(folder.path, None)


def test_the_command_writes_a_party_s_file(
    once: vfl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["export", "model", str(once.folder), "--party", "shop"]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert (done.exception, done.output) == (None, "shop.safetensors\n")
    assert vfl.Model.load("shop.safetensors").party == "shop"
    again = CliRunner().invoke(cli, words, standalone_mode=False)
    assert isinstance(again.exception, InputError)
    named = CliRunner().invoke(
        cli, ["export", "model", str(once.folder / "bank"), "--output", "x.safetensors"]
    )
    assert (named.exit_code, vfl.Model.load("x.safetensors").party) == (0, "bank")


def test_a_model_computes_in_the_recipe_s_precision() -> None:
    found = run(recipe=RECIPE.replace({"model.precision": "bfloat16"}))
    bank, shop = found.model("bank"), found.model("shop")
    z_BD = torch.cat([bank.embed(NEW["bank"]), shop.embed(NEW["shop"])], dim=1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = present(bank.top)(z_BD).float()
    assert outputs.double().sigmoid().float().flatten().tolist() == found.predict(NEW)["score_1"]
