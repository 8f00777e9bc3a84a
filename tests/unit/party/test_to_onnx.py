"""A party's models as ONNX: ONNX Runtime, which is nobody's of ours, computes what torch does.

Torch's exporter takes about a second for a model, and more for the first.
"""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.models import EncoderSettings, GbdtTop
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.data import Preprocessor
from vfl_party.models import StochasticEncoder, seed_torch
from vfl_party.models.encoders import build_encoder
from vfl_party.models.top import build_joint
from vfl_party.models.trees import BoostedTrees, Matrix, grow
from vfl_party.predict.to_onnx import OPSET, export
from vfl_party.predict.trained import About, TrainedParty

D = 6
IMAGE = (3, 32, 32)
ROWS = 7


def learnt(
    numbers: int = 0,
    vocabularies: tuple[tuple[str, ...], ...] = (),
    image: tuple[int, ...] | None = None,
    **more: Any,
) -> Preprocessor:
    """Statistics as training would have learnt them."""
    channels = image[0] if image is not None else numbers
    drawn = np.random.default_rng(1)
    return Preprocessor(
        numeric_names=tuple(f"n{place}" for place in range(numbers)),
        categorical_names=tuple(f"c{place}" for place in range(len(vocabularies))),
        image_shape=image,
        fill=more.get("fill"),
        shift=tuple(drawn.normal(50.0, 10.0, channels).tolist())
        if image is None
        else (0.4,) * channels,
        scale=tuple(drawn.uniform(0.2, 3.0, channels).tolist()),
        vocabularies=vocabularies,
        one_hot=more.get("one_hot", False),
        flatten=more.get("flatten", False),
    )


def trained(
    kind: str,
    made: Preprocessor,
    model: dict[str, Any] | None = None,
    *,
    with_top: bool = False,
    **settings: Any,
) -> TrainedParty:
    """A passive or active party with weights that are drawn, and statistics of batch norm that no
    initial network has.
    """
    recipe = Recipe.model_validate(cases.recipe(2, model={"embedding_size": D} | (model or {})))
    read: TypeAdapter[EncoderSettings] = TypeAdapter(EncoderSettings)
    own = read.validate_python({"kind": kind} | settings)
    with seed_torch(3):
        encoder = build_encoder(own, made.spec, D)
        top = build_joint(recipe.model, [D, D], 10)
        for name, buffer in encoder.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    about = About(
        run_id="run",
        party="p0",
        recipe_digest=recipe.digest(),
        recipe=recipe,
        encoder=own,
        preprocessor=made.state(),
        labels=None,
    )
    models = {"encoder": encoder.eval()} | ({"top": top.eval()} if with_top else {})
    return TrainedParty(about, models, made, None)


def computed(path: Path, **inputs: Any) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, inputs)
    return found


WORDS = (("north", "south"), ("3", "5", "ü"))
TEXTS = np.resize(
    np.array([["north", "3"], ["", "ü"], ["west", "5"], ["south", ""]], object), (ROWS, 2)
)
# 0: unknown, 1: missing, from 3: the words.
CODES = np.resize(np.array([[3, 3], [1, 5], [0, 4], [4, 1]]), (ROWS, 2))
NUMBERS = np.random.default_rng(2).normal(50, 20, (ROWS, 4)).astype(np.float32)
FILL = (1.0, 2.0, 3.0, 4.0)
HOLES = np.where(np.arange(ROWS * 4).reshape(ROWS, 4) % 5 == 0, np.float32(np.nan), NUMBERS)


def in_torch(party: TrainedParty, values: Any, codes: Any = None) -> Any:
    """What the run computes: prepared by the Preprocessor's own steps in numpy."""
    made = present(party.preprocessor)
    parts = []
    if values is not None:
        if made.fill is not None:
            values = np.where(np.isnan(values), np.array(made.fill, np.float32), values)
        parts.append(made._scale("here", values))
    if codes is not None and made.one_hot:
        parts.append(made._encode_one_hot(codes))
    x = np.concatenate(parts, axis=1) if parts else np.zeros((len(codes), 0), np.float32)
    inputs = [torch.from_numpy(x)]
    if codes is not None and not made.one_hot:
        inputs.append(torch.from_numpy(codes))
    with torch.no_grad():
        return party.models["encoder"](*inputs).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "made", "inputs"),
    [
        ("mlp", learnt(4), {"numbers": NUMBERS}),
        ("mlp", learnt(4, fill=FILL), {"numbers": HOLES}),
        ("mlp", learnt(4, WORDS, fill=FILL, one_hot=True), {"numbers": HOLES, "categories": TEXTS}),
        ("mlp", learnt(0, WORDS, one_hot=True), {"categories": TEXTS}),
        ("tabular", learnt(4, WORDS), {"numbers": NUMBERS, "categories": TEXTS}),
        ("tabular", learnt(0, WORDS), {"categories": TEXTS}),
        ("raw", learnt(D), {"numbers": np.resize(NUMBERS, (ROWS, D))}),
    ],
    ids=["numbers", "missing", "all", "one-hot", "codes", "codes alone", "raw"],
)  # fmt: skip
def test_columns_are_prepared_and_embedded_as_in_torch(
    kind: str, made: Preprocessor, inputs: dict[str, Any], tmp_path: Path
) -> None:
    party = trained(kind, made)
    export(party, tmp_path / "p0.onnx")
    codes = CODES if "categories" in inputs else None
    want = in_torch(party, inputs.get("numbers"), codes)
    assert np.abs(want).max() > 0.01
    for rows in (slice(0, ROWS), slice(0, 1), slice(0, 0)):
        found = computed(
            tmp_path / "p0.onnx", **{name: each[rows] for name, each in inputs.items()}
        )
        assert found.shape == (len(want[rows]), D)
        np.testing.assert_allclose(found, want[rows], rtol=1e-5, atol=1e-5)


# The larger networks of torchvision are built as ResNet-18 is, and take minutes in onnx's own
# evaluator.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("mlp", {}), ("cnn", {"channels": [4]}), ("cnn0", {}), ("cnn1", {}), ("resnet18", {})],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_images_are_prepared_and_embedded_as_in_torch(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    image = (1, 28, 14) if kind in ("cnn0", "cnn1") else IMAGE
    party = trained(kind, learnt(image=image, flatten=kind == "mlp"), **settings)
    pixels = np.random.default_rng(4).random((ROWS, *image)).astype(np.float32)
    export(party, tmp_path / "p0.onnx")
    found = computed(tmp_path / "p0.onnx", images=pixels)
    np.testing.assert_allclose(found, in_torch(party, pixels), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["concat", "mean", "attention"])
def test_the_top_model_takes_an_embedding_of_each_party(rule: str, tmp_path: Path) -> None:
    party = trained("mlp", learnt(2), {"combine": rule, "top": {"hidden": [5]}}, with_top=True)
    files = export(party, tmp_path / "p0.onnx")
    assert [each.name for each in files] == ["p0.onnx", "p0-top.onnx", "p0.json"]
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    z = {
        f"embedding of {name}": np.random.default_rng(k).random((ROWS, D)).astype(np.float32)
        for k, name in enumerate(["p0", "p1"])
    }
    mine, theirs = (torch.from_numpy(each) for each in z.values())
    joined = {
        "concat": torch.cat([mine, theirs], dim=1),
        "mean": (mine + theirs) / 2,
        "attention": torch.stack([mine, theirs], dim=1),
    }
    with torch.no_grad():
        want = party.models["top"](joined[rule]).numpy()
    np.testing.assert_allclose(computed(files[1], **z), want, rtol=1e-5, atol=1e-5)


def test_an_encoder_that_draws_gives_its_mean(tmp_path: Path) -> None:
    party = trained("mlp", learnt(4))
    with seed_torch(5):
        encoder = StochasticEncoder(nn.Linear(4, 2 * D), D, 1.0).eval()
    assert party.preprocessor is not None
    export(
        TrainedParty(party.about, {"encoder": encoder}, party.preprocessor, None),
        tmp_path / "p0.onnx",
    )
    with torch.no_grad():
        x = torch.from_numpy(party.preprocessor._scale("here", NUMBERS))
        want = encoder.encoder(x)[:, :D].numpy()
    np.testing.assert_allclose(computed(tmp_path / "p0.onnx", numbers=NUMBERS), want, atol=1e-5)


@pytest.mark.slow
def test_the_files_say_what_they_are_and_nothing_of_this_machine(tmp_path: Path) -> None:
    party = trained("tabular", learnt(4, WORDS, fill=FILL), with_top=True)
    export(party, tmp_path / "p0.onnx")
    model = onnx.load(tmp_path / "p0.onnx")
    assert {each.domain: each.version for each in model.opset_import}[""] == OPSET
    (props,) = model.metadata_props
    about = json.loads(props.value)
    assert json.loads((tmp_path / "p0.json").read_text())["p0.onnx"] == {
        key: value for key, value in about.items() if key != "output"
    }
    assert about["inputs"]["categories"]["words"] == {
        "c0": ["north", "south"],
        "c1": ["3", "5", "ü"],
    }
    assert about["inputs"]["numbers"]["columns"] == ["n0", "n1", "n2", "n3"]
    assert (about["opset"], about["encoder"], about["output"]) == (
        OPSET,
        "tabular",
        "embedding of p0",
    )
    shape = model.graph.output[0].type.tensor_type.shape.dim
    assert (shape[0].dim_param, shape[1].dim_value) == ("rows", D)
    for name in ("p0.onnx", "p0-top.onnx"):
        data = (tmp_path / name).read_bytes()
        assert str(Path(__file__).parents[3]).encode() not in data
        assert b"/site-packages/" not in data
    with raises(InputError, Code.FILE_INVALID, names="p0.onnx"):
        export(party, tmp_path / "p0.onnx")
    (tmp_path / "p0.onnx").unlink()
    # The other files are not overwritten either.
    with raises(InputError, Code.FILE_INVALID, names=("top.onnx", "p0")):
        export(party, tmp_path / "p0.onnx")
    with raises(InputError, Code.FILE_INVALID, names="p0.pt"):
        export(party, tmp_path / "p0.pt")


class Branching(nn.Module):
    """What it computes depends on the rows: no graph has both ways."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, D) if bool(x.sum() > 0) else -x[:, :1].expand(-1, D)


class Drawing(nn.Module):
    """Draws in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape[0], D)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [Branching(), Drawing()], ids=["branches", "draws"])
def test_an_encoder_that_is_no_graph_is_refused_by_name(encoder: nn.Module, tmp_path: Path) -> None:
    party = trained("mlp", learnt(4))
    odd = TrainedParty(party.about, {"encoder": encoder}, present(party.preprocessor), None)
    with raises(InputError, Code.MODEL_INVALID, names=("mlp", "p0")):
        export(odd, tmp_path / "p0.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_equal_in_onnx_is_refused(tmp_path: Path) -> None:
    party = trained("mlp", learnt(4), {"precision": "bfloat16"})
    with raises(InputError, Code.MODEL_INVALID, names="p0"):
        export(party, tmp_path / "p0.onnx")
    with raises(InputError, Code.MODEL_INVALID):
        export(TrainedParty(party.about, {}, None, None), tmp_path / "p0.onnx")


@pytest.mark.slow
def test_trees_take_own_columns_and_the_others_embeddings(tmp_path: Path) -> None:
    """Also those of a party that is away, which are missing numbers."""
    drawn = np.random.default_rng(5)
    x_NF = drawn.normal(size=(400, 4 + D)).astype(np.float32)
    x_NF[::5, 4:] = np.nan
    y_N = drawn.integers(0, 10, 400).astype(float)
    top = {"kind": "gbdt", "trees": 8, "min_rows": 5}
    party = trained("raw", learnt(4), {"top": top}, with_top=True)
    trees, recipe = party.models["top"], party.about.recipe
    assert isinstance(trees, BoostedTrees)
    assert isinstance(recipe.model.top, GbdtTop)
    matrix = Matrix(x_NF.astype(np.float64), y_N, None)
    trees.take(grow(recipe.task, recipe.model.top, matrix, None, 0))
    export(party, tmp_path / "p0.onnx")
    fed = {"embedding of p0": x_NF[:, :4], "embedding of p1": x_NF[:, 4:]}
    found = computed(tmp_path / "p0-top.onnx", **fed)
    np.testing.assert_allclose(found, trees(torch.from_numpy(x_NF)), rtol=0, atol=1e-6)
    about = json.loads((tmp_path / "p0.json").read_text())["p0-top.onnx"]
    assert about["inputs"]["embedding of p0"]["shape"] == ["rows", 4]
    # The encoder's file prepares the columns, and does nothing else.
    raw = drawn.normal(50.0, 10.0, (7, 4)).astype(np.float32)
    shift, scale = (np.array(each) for each in (learnt(4).shift, learnt(4).scale))
    prepared = computed(tmp_path / "p0.onnx", numbers=raw)
    np.testing.assert_allclose(prepared, (raw - shift) / scale, rtol=0, atol=1e-4)


def test_quantiles_are_not_written_as_onnx(tmp_path: Path) -> None:
    made = replace(learnt(1), quantiles=((0.0, 1.0),))
    with raises(InputError, Code.MODEL_INVALID, names=("quantile", "data.scale")):
        export(trained("mlp", made), tmp_path / "p0.onnx")
    assert list(tmp_path.iterdir()) == []
