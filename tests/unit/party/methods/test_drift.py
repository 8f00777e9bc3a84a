"""How far embeddings have moved, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vfl_party.phases.drift import Drift
from vfl_party.phases.scoring import Chunk


def validate(drift: Drift, *chunks: Chunk) -> dict[str, float]:
    # As they are.
    assert [*drift.chunks(chunks)] == [*chunks]
    return drift.measure_drift()


def of(p1: Tensor | None, own: Tensor | None = None) -> Chunk:
    return Chunk([] if own is None else [own], {"p1": p1})


OLD, NEW = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[3.0, 2.0], [0.0, 4.0]])


def test_drift_is_relative_to_the_validation_before() -> None:
    drift = Drift("p0")
    assert validate(drift, of(OLD, own=OLD)) == {}
    assert validate(drift, of(NEW, own=OLD)) == {"p0": 0.0, "p1": pytest.approx(2 / 5)}
    assert validate(drift, of(NEW, own=NEW)) == {"p0": pytest.approx(2 / 5), "p1": 0.0}


def test_rows_of_several_chunks_count_together_and_only_the_first_four() -> None:
    drift = Drift("p0")
    validate(drift, *[of(OLD)] * 5)
    assert validate(drift, of(NEW), *[of(OLD)] * 3, of(100 * NEW)) == {"p1": pytest.approx(2 / 10)}


def test_a_party_that_was_away_is_left_out() -> None:
    drift = Drift("p0")
    validate(drift, of(OLD, own=OLD))
    assert validate(drift, of(None, own=OLD)) == {"p0": 0.0}
    # Nothing to compare with.
    assert validate(drift, of(NEW, own=OLD)) == {"p0": 0.0}
    assert validate(drift, of(NEW, own=OLD)) == {"p0": 0.0, "p1": 0.0}
    # Half of the rows.
    assert validate(drift, of(NEW), of(None)) == {}
    assert validate(drift, of(None), of(NEW)) == {}
    assert validate(drift, of(NEW), of(NEW)) == {}


def test_without_validation_rows_it_is_of_mean_and_deviation() -> None:
    drift = Drift("p0")
    for batch in OLD.split(1):
        drift.batch([], {"p1": batch})
    assert drift.measure_drift() == {}
    for batch in (NEW[:1], NEW[1:]):
        drift.batch([batch], {"p1": batch})
    before = torch.stack([OLD.mean(0), OLD.std(0, correction=0)])
    now = torch.stack([NEW.mean(0), NEW.std(0, correction=0)])
    assert drift.measure_drift() == {
        "p1": pytest.approx(((now - before).norm() / before.norm()).item(), rel=1e-6)
    }


def test_it_looks_at_no_more_than_the_first_rows_of_training() -> None:
    drift = Drift("p0")
    for _ in range(10):
        drift.batch([], {"p1": OLD.repeat(512, 1)})
    rows, mean_D, squares_D = drift.state()["statistics"]["p1"]
    assert rows == 4096
    assert torch.equal(mean_D, OLD.mean(0))
    assert torch.equal(squares_D, 4096 * OLD.var(0, correction=0))


def test_batches_of_any_sizes_give_the_statistics_of_all_rows() -> None:
    z_ND = 3.0 + torch.randn(100, 5, generator=torch.Generator().manual_seed(7))
    drift, before = Drift("p0"), torch.ones(2, 5)
    drift.load_state({"before": {"p1": before}, "rows": 0})
    for batch in z_ND.split([1, 40, 59]):
        drift.batch([], {"p1": batch})
    now = torch.stack([z_ND.mean(0), z_ND.std(0, correction=0)])
    assert drift.measure_drift() == {
        "p1": pytest.approx(((now - before).norm() / before.norm()).item(), rel=1e-6)
    }


def test_a_checkpoint_of_an_earlier_version_holds_the_embeddings_themselves() -> None:
    whole, later = Drift("p0"), Drift("p0")
    for each in (whole, later):
        each.batch([], {"p1": NEW})
        each.measure_drift()
    whole.batch([], {"p1": OLD})
    later.load_state({"before": whole.state()["before"], "steps": {"p1": [OLD]}, "rows": 2})
    for each in (whole, later):
        each.batch([], {"p1": NEW})
    assert later.measure_drift() == whole.measure_drift() != {}


def test_its_state_goes_on_where_it_was() -> None:
    whole, first = Drift("p0"), Drift("p0")
    for each in (whole, first):
        validate(each, of(OLD))
        each.batch([], {"p1": OLD})
    later = Drift("p0")
    later.load_state(first.state())
    for each in (whole, later):
        each.batch([], {"p1": NEW})
    assert whole.state().keys() == later.state().keys()
    assert later.state()["rows"] == whole.state()["rows"] == 4
    assert validate(later, of(NEW)) == validate(whole, of(NEW)) != {}
