"""Split training in bfloat16: other numbers than float32's, near to them, the same in every run and
after a death.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.harness import cases, reference
from tests.harness.errors import assert_names, raises
from tests.harness.federation import Federation
from tests.integration.test_exact import largest_deviation
from tests.integration.test_resume import assert_equal, held, parameters
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import Code, InputError
from vfl_party.models import forward
from vfl_party.runtime.preflight import check

WIDTH, BATCH, TRAIN, VALIDATION = 64, 32, 96, 12
DATA = cases.columns("sklearn:breast_cancer", 2, limit=120)
RECIPE = cases.recipe(
    2,
    task={"kind": "binary"},
    model={"embedding_size": WIDTH, "top": {"hidden": [16]}, "precision": "bfloat16"},
    phase={
        "epochs": 4,
        "batch_size": BATCH,
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    },
)
RECIPE["phases"].append({"kind": "evaluate"})
# Bytes that p1 has sent.
IN_SECOND_EPOCH = 4096 + 4 * WIDTH * (TRAIN + VALIDATION + BATCH * 3 // 2)


def test_it_is_near_to_float32_and_resumes_bit_for_bit(
    tmp_path: Path, record_property: Any
) -> None:
    with Federation(tmp_path / "undisturbed", RECIPE, DATA) as federation:
        federation.start_all()
        summary = federation.finish()
        got = parameters(federation)
        assert {tensor.dtype for tensors in got.values() for tensor in tensors.values()} == {
            torch.float32
        }
    payload = {
        (link["kind"], link["sender"]): link["payload_bytes"]
        for link in summary["bytes"]["by_link"]
        # Fmt: skip.
        if link["phase"] == "splitnn"
    }
    # float32 on the wire.
    assert payload["embedding", "p1"] == 4 * 4 * WIDTH * (TRAIN + VALIDATION)
    assert payload["gradient", "p0"] == 4 * 4 * WIDTH * TRAIN

    plain = RECIPE | {"model": RECIPE["model"] | {"precision": "float32"}}
    deviation = largest_deviation(got, reference.train(plain, DATA))
    record_property("largest_deviation", deviation)
    print(f"largest deviation from float32: {deviation:.3g}")
    assert 1e-4 < deviation < 2e-2

    with held(tmp_path / "disturbed", RECIPE, DATA, sent=IN_SECOND_EPOCH) as (federation, proxy):
        federation.programs["p1"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p1")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), got)


def test_a_model_gives_float32_and_has_gradients_of_float32() -> None:
    layer, x_BF = torch.nn.Linear(64, 8), torch.randn(16, 64)
    plain, half = (
        forward(layer, x_BF, precision="float32"),
        forward(layer, x_BF, precision="bfloat16"),
    )
    assert plain.dtype == half.dtype == torch.float32
    assert not torch.equal(plain, half)
    assert torch.allclose(plain, half, atol=0.05)
    half.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_a_phase_with_passes_of_its_own_is_refused(tmp_path: Path) -> None:
    tables = RECIPE | {"phases": [{"kind": "fedonce", "epochs": 1}, {"kind": "head", "epochs": 1}]}
    with Federation(tmp_path, tables, DATA, {"p1": {"server": "127.0.0.1:1"}}) as federation:
        (found,) = [
            each
            for each in check(federation.write_party("p1"), None, offline=True)
            if not each.fine
        ]
    assert found.about == "phases"
    assert found.text.startswith(f"{tmp_path}/recipe.toml: phases: fedonce: ")
    assert 'model.precision = "bfloat16"' in found.text
    assert_names(found.text, "fedonce", "recipe.toml")


def test_other_precisions_are_unknown(tmp_path: Path) -> None:
    tables = RECIPE | {"model": RECIPE["model"] | {"precision": "float16"}}
    with Federation(tmp_path, tables, DATA) as federation:
        pass
    with raises(InputError, Code.CONFIG_INVALID, names=("float32", "bfloat16")):
        load_recipe(federation.folder / "recipe.toml")
