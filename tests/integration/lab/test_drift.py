"""What the active party of split training writes down of how far embeddings move: it is right, and
changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vfl
from benchmarks.boost import drift
from tests.harness import cases
from tests.harness.federation import Federation
from tests.harness.memory import parameters
from tests.integration import test_resume as resume
from vfl_leaks.rehearsal import Rehearsal, rehearse
from vfl_party.phases.drift import Drift


def tables(**more: Any) -> dict[str, Any]:
    made = cases.recipe(3, task={"kind": "binary"}, phase={"epochs": 4, "batch_size": 32})
    return (
        made
        | {"simulate": {"parties": cases.columns("sklearn:breast_cancer", 3, limit=200)}}
        | more
    )


def written(folder: Path) -> dict[int, dict[str, float]]:
    """Returns {round: its drift}; of a round that was repeated, the last."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["round"]: line["drift"] for line in lines if "drift" in line}


def test_it_is_what_a_rehearsal_computes_from_what_came(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")
    run = rehearse(
        vfl.Recipe.from_dict(tables()), {}, tmp_path / "runs", rehearsal.attach, quiet=True
    )
    found = written(run.folder / "p0")
    assert [*found] == [2, 3, 4]
    assert all(each.keys() == {"p0", "p1", "p2"} for each in found.values())
    seen = rehearsal.scene("p0", 1).embeddings
    for name in ("p1", "p2"):
        wanted = [*drift(batch for batch in seen[name]() if batch.exchange == "validation")]
        assert [each[name] for each in found.values()] == pytest.approx(wanted, rel=1e-6)
    assert not written(run.folder / "p1")
    assert "drift" not in (run.folder / "summary.json").read_text()


@pytest.mark.parametrize(
    "rows", [{"validation": 0.1, "test": 0.2}, {"validation": 0.0, "test": 0.2}], ids=str
)
def test_a_run_is_the_same_with_and_without_it(
    rows: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without validation rows it is of the statistics of training steps."""
    with_it = vfl.simulate(tables(rows=rows), out=tmp_path, quiet=True)
    assert [*written(with_it.folder / "p0")] == [2, 3, 4]
    monkeypatch.setattr(Drift, "chunks", lambda _self, found: found)
    monkeypatch.setattr(Drift, "batch", lambda _self, _own, _others: None)
    monkeypatch.setattr(Drift, "measure_drift", lambda _self: {})
    without = vfl.simulate(tables(rows=rows), out=tmp_path, quiet=True)
    assert not written(without.folder / "p0")
    assert with_it.metrics == without.metrics
    for name in ("p0", "p1", "p2"):
        one, other = parameters(with_it.folder / name), parameters(without.folder / name)
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert with_it.bytes.total == without.bytes.total


@pytest.mark.parametrize("victim", ["p0", "p2"])
def test_a_killed_run_writes_what_an_undisturbed_one_does(victim: str, tmp_path: Path) -> None:
    with Federation(tmp_path / "undisturbed", resume.recipe(), resume.DATA) as federation:
        federation.start_all()
        federation.finish()
        wanted = written(federation.run_folder / "p0")
    with resume.held(tmp_path / "held", resume.recipe(), sent=resume.SECOND_EPOCH) as (
        federation,
        proxy,
    ):
        federation.wait_for_checkpoint(resume.AFTER_FIRST)
        resume.kill(federation, proxy, victim)
        assert federation.finish()["interruptions"] == 1
        found = written(federation.run_folder / "p0")
    assert [*wanted] == [2, 3, 4]
    assert all(value > 1e-3 for each in wanted.values() for value in each.values())
    assert found == wanted
