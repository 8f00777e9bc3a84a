"""The encoders of examples/encoders train, alone and between processes, and say in a sentence what
they cannot take.
"""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch

import vfl
from tests.harness import cases, reference
from tests.harness.errors import raises
from tests.harness.federation import Federation
from tests.harness.here import one_launcher
from tests.harness.memory import in_memory, in_process
from tests.integration.test_exact import TOLERANCE, largest_deviation
from vfl_common.errors import Code, InputError
from vfl_party.models import InputSpec

EXAMPLES = Path(__file__).parents[2] / "examples" / "encoders"
BINARY = {"kind": "binary"}
FT = {
    "kind": "custom",
    "factory": "ft_transformer:FTTransformer",
    "options": {"width": 8, "blocks": 1, "heads": 2},
}
ROWS = 120


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the examples are found, and forgotten afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for path in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


def tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Two tables with numbers and categories, of which the label is a function."""
    rng = np.random.default_rng(5)
    ids = [f"r{row:03d}" for row in range(ROWS)]
    age, town = rng.normal(size=ROWS).round(3), rng.choice(["Ulm", "Bonn", "Kiel"], ROWS)
    spent, card = rng.normal(size=ROWS).round(3), rng.choice(["gold", "blue"], ROWS)
    bought = ((age + (town == "Ulm") * 2 - (card == "gold") * 2 + spent) > 0).astype(int)
    bank = pd.DataFrame({"id": ids, "age": age, "town": town, "bought": bought})
    shop = pd.DataFrame({"id": ids, "spent": spent, "card": card})
    bank.to_csv(folder / "bank.csv", index=False)
    shop.to_csv(folder / "shop.csv", index=False)
    return {
        "p0": {"source": str(folder / "bank.csv"), "id": "id", "label": "bought"},
        "p1": {"source": str(folder / "shop.csv"), "id": "id"},
    }


@pytest.mark.usefixtures("float64")
def test_a_transformer_over_columns_is_exact_with_codes(
    examples: None, tmp_path: Path, record_property: Any
) -> None:
    # Not Adam: the bias of the keys has a gradient of zero but for rounding, which Adam divides by
    # its own size.
    phase = {"optimizer": {"kind": "sgd", "lr": 0.1}}
    recipe = cases.recipe(2, task=BINARY, model={"encoder": FT}, phase=phase)
    data = tables(tmp_path)
    want = reference.train(recipe, data)
    # Towns and cards with the codes for unknown, missing and hidden ones.
    assert want["p0"]["encoder.tokens.table.weight"].shape == (3 + 3, 8)
    assert want["p1"]["encoder.tokens.table.weight"].shape == (2 + 3, 8)
    worst = largest_deviation(in_memory(tmp_path / "here", recipe, data), want)
    shutil.copy(EXAMPLES / "ft_transformer.py", tmp_path)
    allowed = {name: {"allow_code": ["ft_transformer"]} for name in data}
    with Federation(tmp_path, recipe, data, allowed) as federation:
        federation.start_all()
        federation.finish()
        found = {name: federation.parameters(name) for name in federation.names}
    worst = max(worst, largest_deviation(found, want))
    record_property("largest_deviation", worst)
    assert worst <= TOLERANCE


def test_a_transformer_over_columns_learns(examples: None, tmp_path: Path) -> None:
    phase = {"epochs": 25, "optimizer": {"lr": 0.01}}
    recipe = cases.recipe(2, task=BINARY, model={"encoder": FT}, phase=phase)
    recipe["phases"].append({"kind": "evaluate"})
    summary = in_process(tmp_path / "run", recipe, tables(tmp_path))
    # ln 2 is the loss of a model that knows nothing.
    assert summary.metrics["test"]["loss"] < 0.4


def test_a_transformer_over_columns_takes_no_images(examples: None, tmp_path: Path) -> None:
    with raises(
        InputError,
        Code.MODEL_INVALID,
        names=("ft_transformer:FTTransformer", "model.encoder.factory"),
    ):
        in_memory(tmp_path, cases.recipe(2, model={"encoder": FT}), cases.digits(2))


def pretrained(weights: Path, **more: Any) -> dict[str, Any]:
    options = {"weights": str(weights), "width": 6, **more}
    return {"kind": "custom", "factory": "pretrained:Pretrained", "options": options}


def with_encoder(encoder: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which p1 has an encoder of its own."""
    recipe = cases.recipe(2, task=BINARY)
    recipe["parties"][1]["encoder"] = encoder
    return recipe


TABLE = cases.columns("sklearn:breast_cancer", 2, limit=100)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("frozen", [True, False])
def test_an_encoder_begins_with_weights_from_a_file(
    frozen: bool, examples: None, tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        linear = torch.nn.Linear(15, 6)
    safetensors.torch.save_file(torch.nn.Sequential(linear).state_dict(), path)
    recipe = with_encoder(pretrained(path, frozen=frozen))
    found, want = in_memory(tmp_path, recipe, TABLE), reference.train(recipe, TABLE)
    assert largest_deviation(found, want) <= TOLERANCE
    moved = found["p1"]["encoder.body.0.weight"] - linear.weight.detach()
    # Adam moves a weight by about its rate a step, 0.001 in 12 steps: far less than from a fresh draw.
    assert moved.abs().max() <= (0.0 if frozen else 0.013)
    assert bool(moved.any()) is not frozen


@pytest.mark.parametrize("fault", ["absent", "no safetensors", "names", "shape", "type"])
def test_a_file_that_does_not_fit_is_one_sentence(
    fault: str, examples: None, tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    found = torch.nn.Sequential(torch.nn.Linear(14 if fault == "shape" else 15, 6)).state_dict()
    if fault == "names":
        found = {f"net.{name}": each for name, each in found.items()}
    if fault == "type":
        found = {name: each.double() for name, each in found.items()}
    if fault != "absent":
        safetensors.torch.save_file(found, path)
    if fault == "no safetensors":
        path.write_text("weights")
    with raises(
        InputError, Code.MODEL_INVALID, names=("pretrained:Pretrained", "model.encoder.factory")
    ):
        in_memory(tmp_path, with_encoder(pretrained(path)), TABLE)


WORDS = ["late", "again", "broken", "thank", "you", "good", "fast", "parcel"]


def test_text_is_learnt_from_token_columns(examples: None) -> None:
    tokens = import_module("tokens")

    rng = np.random.default_rng(2)
    ids = [f"c{row:03d}" for row in range(200)]
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in ids]
    angry = [int(("broken" in text) or ("late" in text)) for text in texts]
    shop = pd.DataFrame({"id": ids, "note": texts})
    shop.loc[3, "note"] = None
    columns = tokens.token_columns(shop, "note", length=8)
    assert columns.loc[3].tolist() == [0] * 8
    assert columns.to_numpy().max() < tokens.VOCABULARY
    bank = pd.DataFrame({"id": ids, "age": rng.normal(size=len(ids)), "left": angry})
    recipe = cases.recipe(2, task=BINARY, phase={"epochs": 20, "optimizer": {"lr": 0.02}})
    recipe["parties"][1]["encoder"] = {"kind": "custom", "factory": "tokens:TextEncoder"}
    recipe["phases"].append({"kind": "evaluate"})
    names = list(columns)
    data = {
        "p0": vfl.Data(bank, id="id", label="left"),
        "p1": vfl.Data(
            shop[["id"]].join(columns), id="id", settings={"numeric": names, "scale": "none"}
        ),
    }
    with one_launcher():
        run = vfl.simulate(recipe, data, quiet=True)
    assert run.metrics["test"]["accuracy"] > 0.9
    # The encoder gets the numbers of the words.
    (x_BL,) = run.model("p1").prepare(columns.head(2))
    assert x_BL.tolist() == columns.head(2).to_numpy().tolist()


def test_the_number_of_a_word_is_as_documented(examples: None) -> None:
    tokens = import_module("tokens")

    # CRC-32 of "thank" and of "you".
    thank, you = 1 + 0x5CE93110 % 99, 1 + 0x666B7816 % 99
    assert tokens.tokens("Thank YOU, thank you!", 6, 100) == [thank, you, thank, you, 0, 0]
    assert tokens.tokens("Thank YOU, thank you!", 2, 100) == [thank, you]
    with pytest.raises(ValueError, match="columns"):
        tokens.TextEncoder(InputSpec((1, 8, 8)), 4)
