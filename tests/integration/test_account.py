"""The account over several runs of real programs: what they spend together, limits, and kills."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from tests.harness import cases
from tests.harness.federation import Federation, refused
from vfl_party.account.store import FILE
from vfl_party.cli import cli
from vfl_party.privacy.accountant import ORDERS
from vfl_party.record.book import folder_of

ROWS, WIDTH = 60, 4
DATA = cases.columns("sklearn:breast_cancer", 2, limit=ROWS)


def account(federation: Federation, name: str) -> dict[str, dict[str, Any]]:
    """What ``vfl-party account`` says of each peer, about the people."""
    found = CliRunner().invoke(cli, ["account", str(federation.folder / f"{name}.toml"), "--json"])
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.output.splitlines()]
    assert all(line["data_set"] == 1 for line in lines), lines
    return {line["peer"]: line for line in lines}


def split(epochs: int = 2, **phase: Any) -> dict[str, Any]:
    """Split training of all rows."""
    return cases.recipe(
        2,
        task={"kind": "binary"},
        model={"embedding_size": WIDTH, "encoder": {"kind": "mlp", "hidden": [8]}},
        phase={"epochs": epochs, "batch_size": 15} | phase,
        rows={"validation": 0.0, "test": 0.0},
    )


def limited(**limits: Any) -> dict[str, dict[str, Any]]:
    return {"p1": {"policy": {"level": "open", "account": limits}}}


def test_runs_add_up_until_one_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Two epochs tell 8 numbers of each person: two runs fit into 20, and a third does not."""
    with Federation(tmp_path, split(), DATA, limited(numbers_of_a_person=20)) as federation:
        for runs in (1, 2):
            federation.start_all()
            for name in ("server", "p0", "p1"):
                assert federation.programs[name].wait() == 0, federation.programs[name].stderr
            found = account(federation, "p1")["p0"]
            assert (found["runs"], found["people"]) == (runs, ROWS)
            assert found["spent"]["numbers_of_a_person"] == 2 * WIDTH * runs
            assert found["spent"]["bytes_of_a_person"] == 2 * WIDTH * 4 * runs
            assert found["left"] == {"numbers_of_a_person": 20 - 8 * runs}
            assert found["spent"]["epsilon"] == 0
            assert found["without_privacy"] == 8 * runs
        folder = folder_of(tmp_path / "runs", "p1")
        assert (folder / FILE).stat().st_mode & 0o777 == 0o600
        lines = (folder / "lines.jsonl").read_bytes()
        federation.start_all()
        text = refused(federation.programs["p1"], "policy.account.numbers_of_a_person = 20", "p0")
        assert "has got 16 numbers about one person, and this run would add 8" in text
        # Nothing left, and the others read no figure.
        assert (folder / "lines.jsonl").read_bytes() == lines
        federation.programs["p0"].stop()
        # Without the file the record gives the same account.
        before = account(federation, "p1")
        (folder / FILE).unlink()
        assert account(federation, "p1") == before
