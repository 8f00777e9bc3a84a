"""A method, a transform and a codec of one's own, installed beside the product: nothing in it is touched."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import cases
from tests.harness.federation import Federation
from tests.harness.plugins import environment, metadata

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
LR = 0.1


def run(folder: Path, phase: dict[str, Any], found: dict[str, str]) -> tuple[Federation, dict[str, Any]]:
    """A run of two parties with one phase that is named ``splitnn``; (its federation, its summary)."""
    tables = cases.recipe(2) | {"phases": [{"name": "splitnn", "epochs": 2, "batch_size": 24} | phase]}
    with Federation(folder, tables, cases.digits(2)) as federation:
        federation.start_server()
        for name in federation.names:
            party = federation.write_party(name).name
            federation.start(name, "vfl-party", "run", party, environment=found)
        return federation, federation.finish()


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs for which the example is installed."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    return environment(metadata(tmp_path_factory.mktemp("site"), project["entry-points"]), PLUGIN)


def test_a_method_from_outside_trains_as_ours_does(tmp_path: Path, plugins: dict[str, str]) -> None:
    ours, _ = run(tmp_path / "ours", {"kind": "splitnn", "optimizer": {"kind": "sgd", "lr": LR}}, plugins)
    theirs, summary = run(tmp_path / "theirs", {"kind": "plain", "lr": LR}, plugins)
    for name in ours.names:
        want, got = ours.parameters(name), theirs.parameters(name)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want), name
    assert [line["exchange"] for line in summary["exchanges"]] == ["rows", "embedding", "embedding"]


def test_a_transform_and_a_codec_from_outside_are_in_the_chain(tmp_path: Path, plugins: dict[str, str]) -> None:
    transforms = [{"kind": "row_clip", "exchange": "embedding", "norm": 0.5}]
    phase = {"kind": "plain", "codec": "saturating", "transforms": transforms}
    _, summary = run(tmp_path, phase, plugins)
    (up,) = (
        line for line in summary["exchanges"] if (line["exchange"], line["sender"]) == ("embedding", "passive parties")
    )
    assert up["chain"] == "rows clipped to 0.5 -> saturating float16"
    sent = {line["kind"]: line["payload_bytes"] for line in summary["bytes"]["by_link"] if line["phase"] == "splitnn"}
    assert sent["embedding"] == sent["gradient"] == 2 * 80 * 8 * 2  # epochs, training rows, width, bytes a number


def test_a_plug_in_that_is_not_installed_is_one_sentence(tmp_path: Path) -> None:
    tables = cases.recipe(2) | {"phases": [{"kind": "splitnn", "epochs": 1, "codec": "saturating"}]}
    with Federation(tmp_path, tables, cases.digits(2)) as federation:
        federation.start_server()
        program = federation.start_party("p1")
        assert program.wait(60) == 2
        (line,) = [line for line in program.stderr.splitlines() if line]
    assert "there is no codec 'saturating'" in line
    assert json.dumps("bfloat16")[1:-1] in line
