"""A run that starts from another: its encoders are the other run's, everything else is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import cases
from tests.harness.federation import Federation, refused
from vfl_party.base.checkpoint import CheckpointStore

DATA = cases.digits(2)
# A step of no size in float32.
STILL = {"epochs": 1, "optimizer": {"kind": "sgd", "lr": 1e-30}}


def start_from(run: str, **changes: Any) -> dict[str, Any]:
    """The second recipe: another seed, so that its own initial weights would be others."""
    return cases.recipe(2, seed=8, phase=STILL, **changes) | {"start": {"run": run}}


def test_encoders_are_those_of_the_earlier_run(tmp_path: Path) -> None:
    with Federation(tmp_path, cases.recipe(2), DATA) as first:
        first.start_all()
        first.finish()
        earlier = {name: first.parameters(name) for name in first.names}
        run = first.run_folder.name
    with Federation(
        tmp_path, start_from(run), DATA, server_options=("--run-id", "second")
    ) as second:
        second.start_all()
        for name, program in second.programs.items():
            assert program.wait() == 0, f"{name}: {program.stderr}"
    for name, weights in earlier.items():
        store = CheckpointStore(tmp_path / "runs" / "second" / name / "checkpoints", keep=2)
        models = store.load(store.labels()[-1])["job"]["models"]
        assert set(models) == ({"encoder", "top"} if name == cases.ACTIVE else {"encoder"})
        for key, value in models["encoder"].items():
            assert torch.equal(value, weights[f"encoder.{key}"]), (name, key)
        if name == cases.ACTIVE:
            assert not torch.equal(models["top"]["0.weight"], weights["top.0.weight"])


@pytest.mark.parametrize(
    ("run", "changes", "names"),
    [
        ("gone", {}, ("start.run", "gone", "p1")),
        ("begun", {}, ("start.run", "begun")),
        ("../elsewhere", {}, ("start.run",)),
        (None, {"model": {"encoder": {"kind": "mlp", "hidden": [9]}}}, ("start.run",)),
    ],
    ids=["missing", "unfinished", "no-plain-name", "other-model"],
)
def test_a_run_that_cannot_be_started_from_is_one_sentence(
    tmp_path: Path, finished: Path, run: str | None, changes: dict[str, Any], names: tuple[str, ...]
) -> None:
    begun = tmp_path / "runs" / "begun" / "p1"
    begun.mkdir(parents=True)
    (begun / "run.json").write_text('{"run_id": "begun", "job": "train"}')
    (tmp_path / "runs" / finished.name).symlink_to(finished)
    with Federation(tmp_path, start_from(run or finished.name, **changes), DATA) as federation:
        # Nobody is asked.
        federation.address = "127.0.0.1:9"
        refused(federation.start_party("p1"), *names)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    with Federation(
        tmp_path_factory.mktemp("finished"), cases.recipe(2, phase={"epochs": 1}), DATA
    ) as federation:
        federation.start_all()
        federation.finish()
        return federation.run_folder
