"""What a forecast reckons with for masking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from vfl.commands import forecast
from vfl_party.align import masking_time
from vfl_party.align.masking_time import MaskingTime

RECIPE = """
name = "case"
task = { kind = "binary" }
rows = { align = "psi" }
parties = [
    { name = "bank", role = "active" },
    { name = "shop", role = "passive" },
    { name = "post", role = "passive" },
]
model = { embedding_size = 4, encoder = { kind = "mlp", hidden = [6] } }
phases = [{ kind = "splitnn", epochs = 1, batch_size = 64 }]
"""
# In two rounds: 4 of one's own and 2 × 6 of others.
TIME = MaskingTime(own_s=4.0, others_s=6.0, feeding_s=0.5)


@pytest.mark.parametrize(("workers", "batch_s"), [(1, 8.0), (2, 4.0), (16, 0.5), (64, 0.5)])
def test_a_batch_takes_the_workers_or_who_feeds_them(workers: int, batch_s: float) -> None:
    assert TIME.batch_s(workers, rounds=2) == batch_s


@pytest.mark.parametrize("workers", [1, 2])
def test_a_forecast_counts_masking(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking_time, "measure_masking", lambda: TIME)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    # Three batches in each of two rounds.
    args = [str(path), "--rows", str(3 * 2048), "--bandwidth", "1000Gbit/s", "--latency", "0.1us"]
    runner = CliRunner()
    found = runner.invoke(forecast, [*args, "--json", "--workers", str(workers)])
    assert found.exit_code == 0, found.output
    (align,) = [each for each in json.loads(found.output)["phases"] if each["name"] == "align"]
    assert align["seconds"] == pytest.approx(2 * 3 * 8.0 / workers, rel=1e-3)
    shown = runner.invoke(forecast, [*args, "--workers", str(workers)])
    assert "Masking of ids, measured here" in shown.output


@pytest.mark.slow
def test_masking_is_measured() -> None:
    found = masking_time.measure_masking()
    assert 0 < found.feeding_s < min(found.own_s, found.others_s)
