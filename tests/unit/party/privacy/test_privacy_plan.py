"""What a recipe's private phases are to cost, the settings that fit together, and a budget that is
not passed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.data import Features
from vfl_party.methods.fedonce.phase import Nat
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData
from vfl_party.privacy import accountant
from vfl_party.privacy.accountant import Spending
from vfl_party.privacy.plan import DpSettings, PrivacyPlan, make_plan

N, WIDTH = 300, 3
DP = {"epsilon": 4.0, "delta": 1e-5}
FEDONCE: dict[str, Any] = {"kind": "fedonce", "epochs": 6, "batch_size": 50, "dp": DP}
HEAD: dict[str, Any] = {"kind": "head", "epochs": 20, "batch_size": 40, "dp": DP}
SPLITNN = {"kind": "splitnn", "epochs": 1}


def recipe(*phases: dict[str, Any], passives: int = 2, **more: Any) -> Recipe:
    tables: dict[str, Any] = {
        "name": "plan",
        "task": {"kind": "binary"},
        "parties": [
            {"name": "a", "role": "active"},
            *({"name": f"p{n}", "role": "passive"} for n in range(passives)),
        ],
        "model": {"embedding_size": WIDTH},
        "phases": [*phases, {"kind": "evaluate"}],
    }
    return Recipe.model_validate(tables | more)


def plan_of(*phases: dict[str, Any], **more: Any) -> PrivacyPlan:
    return present(Course(recipe(*phases, **more)).privacy(N))


def test_the_recipe_and_the_rows_say_what_every_party_spends() -> None:
    plan = plan_of(FEDONCE, HEAD)
    noise = plan.shares[0].spending.noise_multiplier
    assert [(each.phase, each.party, each.spending) for each in plan.shares] == [
        ("fedonce", "p0", Spending(noise, 50 / N, 6 * 6)),
        ("fedonce", "p1", Spending(noise, 50 / N, 6 * 6)),
        ("head", "a", Spending(noise, 40 / N, 20 * 8)),
    ]
    assert 3.96 <= plan.epsilon <= 4
    assert plan.epsilon == accountant.compute_epsilon([each.spending for each in plan.shares], 1e-5)
    assert plan.epsilon_after("head", "a", 160) == pytest.approx(plan.epsilon)
    assert (
        0 < plan.epsilon_after("head", "a", 0) < plan.epsilon_after("head", "a", 80) < plan.epsilon
    )
    assert_names(plan.report().statement, "4.00")


def test_the_active_party_may_spend_in_both_phases() -> None:
    plan = plan_of(FEDONCE | {"active": True}, HEAD | {"epochs": None, "steps": 33})
    assert [(each.phase, each.party) for each in plan.shares[-2:]] == [
        ("fedonce", "a"),
        ("head", "a"),
    ]
    # As epochs_over: 7 batches an epoch without sampling, 8 with it.
    assert plan.shares[-1].spending.steps == 5 * 8
    assert plan.parties == ("p0", "p1", "a")


def test_simple_division_gives_each_party_its_part_and_more_noise() -> None:
    simple = DP | {"division": "simple"}
    plan, moments = plan_of(FEDONCE | {"dp": simple}, HEAD | {"dp": simple}), plan_of(FEDONCE, HEAD)
    for share in plan.shares:
        own = accountant.compute_epsilon([share.spending], 1e-5 / 3)
        assert 0.99 * 4 / 3 <= own <= 4 / 3
        assert plan.get_budget(share.phase, share.party).epsilon_after(share.spending.steps) == own
        assert (
            share.spending.noise_multiplier
            > moments.get_share(share.phase, share.party).spending.noise_multiplier
        )
    assert 3.96 <= plan.epsilon <= 4
    assert plan.epsilon == pytest.approx(
        accountant.compute_simple_epsilon([each.spending for each in plan.shares], 1e-5)
    )
    assert plan.epsilon_after("head", "a", 160) == pytest.approx(plan.epsilon)


def test_a_noise_multiplier_says_what_epsilon_will_be() -> None:
    for division in ("moments", "simple"):
        given = {"noise_multiplier": 2.0, "division": division}
        plan = plan_of(FEDONCE | {"dp": given}, HEAD | {"dp": given})
        assert {each.spending.noise_multiplier for each in plan.shares} == {2.0}
        budget = plan.get_budget("fedonce", "p1")
        assert budget.may_step(35)
        assert not budget.may_step(36)
    none = plan_of(FEDONCE | {"dp": {"noise_multiplier": 0.0}})
    assert none.epsilon == math.inf
    assert none.get_budget("fedonce", "p0").may_step(35)
    assert_names(none.report().statement, "representations")


def test_what_trains_without_privacy_is_named() -> None:
    assert_names(plan_of(FEDONCE, {"kind": "head", "epochs": 1}).report().statement, "3.98")
    start = {"start": {"run": "earlier"}}
    text = plan_of(FEDONCE, HEAD, SPLITNN, **start).report().statement
    assert_names(text, "4.00")
    assert_names(
        plan_of(FEDONCE | {"dp": DP | {"mode": "matched"}}, HEAD).report().statement, "4.00"
    )
    # Nothing is matched in head.
    assert plan_of(FEDONCE, HEAD | {"dp": DP | {"mode": "matched"}}).mode == "fixed"


def test_without_dp_there_is_no_plan() -> None:
    assert Course(recipe({"kind": "fedonce"}, SPLITNN)).privacy(N) is None
    assert make_plan([], N) is None


@pytest.mark.parametrize("other", [{"epsilon": 2.0}, {"delta": 1e-6}, {"division": "simple"}])
def test_one_budget_covers_all_phases(other: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        plan_of(FEDONCE, HEAD | {"dp": DP | other})
    assert plan_of(FEDONCE, HEAD | {"dp": DP | {"max_grad_norm": 0.1}}).mode == "fixed"


@pytest.mark.parametrize(
    "change",
    [
        {"objective": "pca"},
        {"objective": "contrastive", "batch_size": 50},
        {"batch_size": 50, "matching": True},
        {"batch_size": 50, "match_every": 2},
        {"rows": "local"},
        {"objective": "reconstruction", "dp": DP | {"mode": "matched"}},
        {"matching": False, "dp": DP | {"mode": "matched"}},
        {"optimizer": {"clip_norm": 1.0}},
        {"dp": {"epsilon": 1.0, "noise_multiplier": 1.0}},
        {"dp": {"epsilonn": 1.0}},
    ],
)
def test_settings_that_do_not_go_together_are_refused(change: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        Course(recipe({"kind": "fedonce", "dp": DP} | change)).privacy(N)


def party(recipe: Recipe, encoder: nn.Module | None = None) -> Party:
    x = torch.randn(N, 7, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    return Party(
        name="p0",
        course=Course(recipe),
        device=torch.device("cpu"),
        models={
            "encoder": encoder or nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, WIDTH))
        },
        data=PartyData({"train": np.arange(N, dtype=np.int64)}, features=Features(x)),
    )


def test_training_stops_where_the_budget_ends() -> None:
    """The phase is asked for an epoch more than the recipe has planned."""
    dp: dict[str, Any] = {"noise_multiplier": 1.5}
    planned = recipe(FEDONCE | {"epochs": 2, "dp": dp})
    plan = present(Course(planned).privacy(N))
    nat = Nat(
        party(planned), "fedonce", FedOnceSettings(epochs=4, batch_size=50, dp=DpSettings(**dp))
    )
    reports = [nat.run_round(epoch) for epoch in range(4)]
    assert [each.steps for each in reports] == [6, 6, 0, 0]
    epsilons = [each.metrics["local"]["epsilon"] for each in reports[:3]]
    assert epsilons[0] < epsilons[1] == epsilons[2] == pytest.approx(plan.epsilon)
    assert [bool(each.note) for each in reports] == [False, False, True, False]
    assert_names(reports[2].note, "12", "3.46484")
    assert "moved" not in reports[0].metrics["local"]


@pytest.mark.parametrize("mode", ["fixed", "matched"])
def test_a_learner_goes_on_from_its_state_bit_for_bit(mode: str) -> None:
    dp: dict[str, Any] = DP | {"mode": mode}
    tables = recipe(FEDONCE | {"dp": dp})
    settings = FedOnceSettings(epochs=6, batch_size=50, dp=DpSettings(**dp))
    ours = party(tables)
    first = Nat(ours, "fedonce", settings)
    drawn = first.targets.clone()
    first.run_round(0)
    state, weights = unpack(*pack([first.state(), dict(ours.models["encoder"].state_dict())]))
    found = first.run_round(1)
    first.close()
    theirs = party(tables)
    second = Nat(theirs, "fedonce", settings)
    theirs.models["encoder"].load_state_dict(weights)
    second.load_state(state)
    assert second.run_round(1) == found
    for name, tensor in ours.models["encoder"].state_dict().items():
        assert torch.equal(theirs.models["encoder"].state_dict()[name], tensor), name
    assert torch.equal(first.targets, second.targets)
    assert torch.equal(first.targets, drawn) == (mode == "fixed")
    # Opacus has left.
    assert not any(hasattr(p, "grad_sample") for p in ours.models["encoder"].parameters())


def test_batch_norm_is_refused_when_the_phases_are_made() -> None:
    norms = nn.Sequential(nn.Linear(7, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH))
    for objective in ("nat", "reconstruction"):
        tables = recipe(FEDONCE | {"objective": objective})
        with raises(InputError, Code.MODEL_INVALID, names="batch_norm"):
            Course(tables).build(party(tables, norms))


def test_reconstruction_trains_its_decoder_privately_too() -> None:
    tables = recipe(FEDONCE | {"objective": "reconstruction", "decoder": [8]})
    (phase, _) = Course(tables).build(party(tables))
    report = phase.run_round(0)
    assert report.steps == 6
    assert {"loss", "epsilon"} == report.metrics["local"].keys()
    assert {"decoder", "private", "schedule"} == phase.state().keys()
    phase.finish()


@pytest.mark.parametrize("delta", [1 / N, 0.5])
def test_a_delta_that_lets_a_whole_row_go_is_refused(delta: float) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("dp.delta", "300")):
        plan_of(FEDONCE | {"dp": DP | {"delta": delta}})
    assert plan_of(FEDONCE | {"dp": DP | {"delta": 0.99 / N}}).epsilon <= 4.0
