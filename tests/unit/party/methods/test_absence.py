"""What stands in for an absent party's embeddings, what is recorded, and where a party that comes
back goes on.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.bundle import StepKey, StepPassed
from vfl_common.config.models import Combine
from vfl_common.config.recipe_tables import PhaseSettings
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.stages import Planned, ahead
from vfl_party.models.training import CombinedEmbeddings, combine
from vfl_party.phases.absence import (
    MAX_STRETCHES,
    Absences,
    Cache,
    Following,
    LatePolicy,
    fill_missing,
)
from vfl_party.phases.course import NamedPhase

OWN, NORTH, SOUTH = (torch.full((2, 3), value) for value in (1.0, 2.0, 6.0))
WIDTHS = {"north": 3, "south": 3}


@pytest.mark.parametrize(
    ("policy", "rule", "want"),
    [
        ("zeros", "sum", [[3.0] * 3] * 2),
        ("zeros", "mean", [[1.0] * 3] * 2),
        ("zeros", "max", [[2.0] * 3] * 2),
        ("zeros", "concat", [[1.0] * 3 + [2.0] * 3 + [0.0] * 3] * 2),
        ("skip", "sum", [[3.0] * 3] * 2),
        ("skip", "mean", [[1.5] * 3] * 2),
        ("skip", "max", [[2.0] * 3] * 2),
        ("skip", "concat", [[1.0] * 3 + [2.0] * 3 + [0.0] * 3] * 2),
    ],
)
def test_an_absent_party_s_place(
    policy: LatePolicy, rule: Combine, want: list[list[float]]
) -> None:
    assert (
        combine(
            rule, fill_missing(policy, rule, [OWN], {"north": NORTH, "south": None}, WIDTHS)
        ).tolist()
        == want
    )


def test_with_all_there_every_policy_combines_all() -> None:
    for policy in ("wait", "zeros", "cached", "skip"):
        assert (
            combine(
                "mean",
                fill_missing(policy, "mean", [OWN], {"north": NORTH, "south": SOUTH}, WIDTHS),
            ).tolist()
            == [[3.0] * 3] * 2
        )


def test_zeros_are_as_wide_as_the_embeddings_of_the_party_that_is_absent() -> None:
    found = fill_missing(
        "zeros", "concat", [OWN], {"north": None, "south": SOUTH}, WIDTHS | {"north": 5}
    )
    assert [each.shape[1] for each in found] == [3, 5, 3]
    assert not found[1].any()
    cache = Cache({"north": 5, "south": 3}, 4, torch.device("cpu"))
    seen = cache.fill({"north": None, "south": SOUTH}, np.array([0, 1]))
    assert present(seen["north"]).shape == (2, 5)


def test_no_gradient_goes_to_what_stands_in() -> None:
    received = {"north": NORTH.clone()}
    combined = CombinedEmbeddings(
        "sum", fill_missing("zeros", "sum", [], {**received, "south": None}, WIDTHS), received
    )
    combined.values[0].sum().backward()
    assert {name: dz.tolist() for name, dz in combined.gradients().items()} == {
        "north": [[1.0] * 3] * 2
    }


def test_the_cache_gives_the_last_embedding_of_each_row() -> None:
    cache = Cache(WIDTHS, 4, torch.device("cpu"))

    def at(rows: list[int], north: Tensor | None, south: Tensor | None) -> Tensor | None:
        return cache.fill({"north": north, "south": south}, np.array(rows))["south"]

    assert at([0, 1], NORTH, SOUTH) is SOUTH
    assert at([2, 1], NORTH, SOUTH + 1) is not None
    found = present(at([1, 3], NORTH, None))
    assert found.tolist() == [[7.0] * 3, [0.0] * 3]
    other = Cache(WIDTHS, 4, torch.device("cpu"))
    other.load_state({name: each.clone() for name, each in cache.state().items()})
    again = other.fill({"north": None, "south": None}, np.array([1, 0]))
    assert {name: None if z is None else z.tolist() for name, z in again.items()} == {
        "north": [[2.0] * 3] * 2,
        "south": [[7.0] * 3, [6.0] * 3],
    }


def step(round_: int, batch: int) -> StepKey:
    return StepKey("train", round_, batch)


def test_absences_are_stretches_of_steps() -> None:
    record = Absences("train")
    assert record.note(step(0, 0), []) == ([], [])
    assert record.note(step(0, 1), ["south"]) == (["south"], [])
    assert record.note(step(1, 0), ["south", "north"]) == (["north"], [])
    again = Absences("train")
    # From a checkpoint.
    again.load_state(record.state())
    assert again.note(step(1, 1), ["north"]) == ([], ["south"])
    assert again.note(step(1, 2), ["south"]) == (["south"], ["north"])
    found = [
        (
            each.party,
            each.first_round,
            each.first_batch,
            each.last_round,
            each.last_batch,
            each.steps,
        )
        for each in again.stretches
    ]
    assert found == [("south", 0, 1, 1, 0, 2), ("north", 1, 0, 1, 1, 2), ("south", 1, 2, 1, 2, 1)]


def test_a_party_that_comes_and_goes_without_end_fills_no_memory() -> None:
    record = Absences("train")
    for batch in range(4 * MAX_STRETCHES):
        record.note(step(0, batch), ["south"] if batch % 2 else [])
    assert len(record.stretches) == MAX_STRETCHES
    assert sum(each.steps for each in record.stretches) == 2 * MAX_STRETCHES
    assert record.stretches[-1].last_batch == 4 * MAX_STRETCHES - 1


def test_a_party_goes_on_at_the_step_that_is_under_way() -> None:
    place = Following(["train", "more"], "p0")
    assert not place.is_over(step(0, 0))
    place.skip(step(0, 0), StepPassed(step(2, 1)))
    assert [place.is_over(each) for each in (step(0, 1), step(2, 0), step(2, 1), step(3, 0))] == [
        True,
        True,
        False,
        False,
    ]
    place.skip(step(2, 1), StepPassed(StepKey("more", 0, 0)))
    assert place.is_over(step(9, 9))


@pytest.mark.parametrize("now", [step(1, 0), step(1, 1), StepKey("other", 5, 0)])
def test_a_step_that_is_not_later_is_refused(now: StepKey) -> None:
    with raises(PeerError, Code.STEP_OUT_OF_ORDER, names="p0"):
        Following(["train", "more"], "p0").skip(step(1, 1), StepPassed(now))


def test_a_passive_party_may_resume_at_any_later_round() -> None:
    plan = [Planned("train", 3, None, lenient=True), Planned("evaluate", 1, None)]
    assert ahead("000001.train.1", plan) == ["000002.train.2", "000003.train.3"]
    assert ahead("000003.train.3", plan) == []
    assert ahead("000000.train.0", plan) == ["000001.train.1", "000002.train.2", "000003.train.3"]
    assert ahead("000001.train.1", [Planned("train", 3, None)]) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"late_policy": "zeros"},
        {"deadline_s": 1.0},
        {"late_policy": "wait", "deadline_s": 1.0},
        {"late_policy": "later", "deadline_s": 1.0},
        {"late_policy": "zeros", "deadline_s": 0.0},
        {"late_policy": "zeros", "deadline_s": 1.0, "early_stopping": {}},
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, object]) -> None:
    with pytest.raises(InputError):
        _ = NamedPhase(
            PhaseSettings(kind="splitnn", name="train", settings={"epochs": 1, **settings})
        ).settings
