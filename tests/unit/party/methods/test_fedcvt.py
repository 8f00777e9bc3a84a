"""FedCVT's parts: estimates, terms, pseudo-labels, batches, and what is refused in one sentence."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.assembly.party import Assembled, assemble, expect_rows, open_party
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.methods.fedcvt.phase import ActiveFedCVT
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.training import (
    CrossViewStep,
    FedCVTBatches,
    Representations,
    attend,
    estimate_view,
    make_own_cycle,
    make_pseudo_labels,
    mean_distance,
    mean_overlap,
)
from vfl_party.phases.context import Party

HERE = Path(__file__).parent
THREE = TaskSettings(kind="multiclass", classes=3)
BINARY = TaskSettings(kind="binary")


def tables(
    parties: int = 2, *, rows: dict[str, Any] | None = None, model: Any = None, **settings: Any
) -> Any:
    """100 digits: 80 for training, of which 48 are aligned and 30 labelled."""
    phase = {
        "kind": "fedcvt",
        "epochs": 3,
        "batch_size": 16,
        "unlabelled_batch_size": 8,
        "own_batch_size": 10,
    }
    made = cases.recipe(parties, rows=rows or {"aligned": 0.6, "labelled": 30}, model=model)
    return made | {"phases": [phase | settings]}


def party(given_: dict[str, Any], name: str = "p0") -> Assembled:
    recipe = Recipe.model_validate(given_)
    data = cases.digits(2) if len(recipe.parties) == 2 else cases.digits(4)
    opened = open_party(recipe, name, DataSettings.model_validate(data[name]), recipe.model.encoder)
    return assemble(opened, expect_rows(opened))


# -- estimates and terms


def test_attention_weighs_values_by_the_keys() -> None:
    q, k = torch.tensor([[2.0, 0.0, 0.0, 0.0]]), torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0] * 4])
    v = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    # 2 · 3 / √4.
    p = torch.tensor([3.0, 0.0]).softmax(dim=0)
    torch.testing.assert_close(attend(q, k, v, 1.0)[0, :2], p)
    torch.testing.assert_close(attend(q, k, v, 0.5)[0, :2], p.square() / p.square().sum())


def test_a_missing_view_is_made_of_the_others_rows() -> None:
    """With one row to attend to, the estimate is that row; own rows of the other party lend their
    shared half alone.
    """
    ours = Representations(torch.ones(1, 4), torch.zeros(2, 4))
    theirs = Representations(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.empty(0, 4))
    found = estimate_view(ours.own, ours, theirs, 1.0)
    torch.testing.assert_close(found, theirs.aligned.expand(2, 4))
    more = Representations(theirs.aligned, torch.tensor([[9.0, 9.0, 5.0, 6.0]]))
    found = estimate_view(ours.own, ours, more, 1.0)
    # Queries of zeros: the mean.
    torch.testing.assert_close(found, torch.tensor([[1.0, 2.0, 4.0, 5.0]]).expand(2, 4))


def test_terms_of_both_presets() -> None:
    a, b = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 1.0]]), torch.zeros(2, 4)
    assert mean_distance(a, b, "paper").item() == pytest.approx((5 + 10) / 2)
    assert mean_distance(a, b, "released").item() == pytest.approx((5 + 10) / 8)
    assert mean_overlap(a, "paper").item() == pytest.approx((2**2 + 3**2) / 2)
    assert mean_overlap(a, "released").item() == pytest.approx((2**2 + 3**2) ** 0.5 / 2)


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_representations_that_do_not_overlap_have_finite_gradients(preset: Any) -> None:
    r = torch.zeros(3, 4, requires_grad=True)
    mean_overlap(r, preset).backward()
    assert torch.equal(present(r.grad), torch.zeros(3, 4))


# -- pseudo-labels


def logits(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


SURE, UNSURE, OTHER = logits(0.8, 0.1, 0.1), logits(0.55, 0.25, 0.2), logits(0.1, 0.8, 0.1)


@pytest.mark.parametrize(
    ("outputs", "threshold", "want"),
    [
        ([SURE, SURE, SURE], 0.5, 0),
        ([OTHER, OTHER, OTHER], 0.5, 1),
        ([SURE, SURE, OTHER], 0.5, None),
        ([OTHER, SURE, SURE], 0.5, None),
        ([SURE, UNSURE, SURE], 0.5, 0),
        ([SURE, UNSURE, SURE], 0.6, None),
        ([SURE, SURE, SURE], 0.9, None),
    ],
)
def test_three_classifiers_agree_and_are_sure(
    outputs: list[Tensor], threshold: float, want: int | None
) -> None:
    taken, labels = make_pseudo_labels(THREE, outputs, threshold)
    assert taken.tolist() == [want is not None]
    assert labels.dtype == torch.int64
    if want is not None:
        assert labels.tolist() == [want]


@given(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), st.floats(0.0, 0.95))
def test_one_logit_names_a_class_as_two_would(p: list[float], threshold: float) -> None:
    taken, labels = make_pseudo_labels(
        BINARY, [torch.tensor([[each]], dtype=torch.float64).logit() for each in p], threshold
    )
    pairs = [torch.tensor([[1 - each, each]], dtype=torch.float64).log() for each in p]
    taken_two, labels_two = make_pseudo_labels(
        TaskSettings(kind="multiclass", classes=2), pairs, threshold
    )
    margin = min(min(abs(each - 0.5), abs(max(each, 1 - each) - threshold)) for each in p)
    # Rounding decides nothing.
    if margin > 1e-9:
        assert taken.tolist() == taken_two.tolist()
        if taken.item():
            assert labels.tolist() == [[float(labels_two.item())]]


# -- batches


def steps_of(name: str, **settings: Any) -> tuple[Party, list[list[CrossViewStep]]]:
    given_ = tables(**settings)
    made = party(given_, name).party
    own = FedCVTSettings.model_validate(
        {k: v for k, v in given_["phases"][0].items() if k != "kind"}
    )
    batches = FedCVTBatches(made, "fedcvt", own)
    return made, [
        batches.get_round_steps(round_, make_own_cycle(made, "fedcvt", own))
        for round_ in range(batches.rounds)
    ]


def test_both_parties_take_the_same_aligned_rows_and_own_rows_of_their_own() -> None:
    ours, theirs = steps_of("p0"), steps_of("p1")
    for each, other in zip(chain(*ours[1]), chain(*theirs[1]), strict=True):
        assert each.labelled.tolist() == other.labelled.tolist()
        assert each.unlabelled.tolist() == other.unlabelled.tolist()
        assert each.own.tolist() != other.own.tolist()
        for step, made in ((each, ours[0]), (other, theirs[0])):
            assert set(step.labelled) <= set(made.rows.get("train"))
            assert set(step.unlabelled) <= set(made.rows.get("aligned")) - set(
                made.rows.get("train")
            )
            assert set(step.own) <= set(made.rows.get("local")) - set(made.rows.get("aligned"))
            assert (len(step.unlabelled), len(step.own)) == (8, 10)


def test_an_epoch_has_every_labelled_row_once_and_the_others_go_round() -> None:
    made, rounds = steps_of("p0", epochs=12, validate_every=5)
    assert [len(steps) for steps in rounds] == [10, 10, 4]
    steps = [*chain(*rounds)]
    assert [len(each.labelled) for each in steps] == [16, 14] * 12
    assert [each.last for each in steps] == [False, True] * 12
    for at in range(0, 24, 2):
        assert sorted(np.concatenate([each.labelled for each in steps[at : at + 2]])) == sorted(
            made.rows.get("train")
        )
    # 32 own rows are three batches of 10.
    for at in range(0, 24, 3):
        assert len(set(np.concatenate([each.own for each in steps[at : at + 3]]))) == 30


@pytest.mark.parametrize(("warmup", "begins"), [(0.0, 0), (0.1, 1), (0.5, 6)])
def test_pseudo_labels_begin_after_the_warm_up(warmup: float, begins: int) -> None:
    _, rounds = steps_of("p0", epochs=12, warmup=warmup)
    assert [steps[0].pseudo for steps in rounds] == [epoch >= begins for epoch in range(12)]


# -- what is refused


@pytest.mark.parametrize(
    "given_",
    [
        tables(4),
        tables(model={"combine": "sum"}),
        tables(model={"embedding_size": 7}),
        tables() | {"task": {"kind": "regression"}},
        tables(unlabelled_batch_size=19),
        tables(own_batch_size=33),
        tables(rows={"aligned": 1.0, "labelled": 30}),
        tables(
            model={"encoder": {"kind": "mlp", "batch_norm": True}},
            batch_size=1,
            unlabelled_batch_size=0,
            own_batch_size=0,
        ),
        tables(epochs=None),
        tables(threshold=1.0),
        tables(lambdas={"shared": -1.0}),
        tables(sharpen=0.0),
        tables(own_batch_size=-1),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_sentence(given_: dict[str, Any]) -> None:
    (phase,) = given_["phases"]
    given_ |= {"phases": [{key: value for key, value in phase.items() if value is not None}]}
    with raises(InputError, Code.CONFIG_INVALID):
        party(given_)


def test_an_active_party_without_features_is_refused() -> None:
    given_ = tables()
    given_["parties"][0]["features"] = False
    with raises(InputError, Code.CONFIG_INVALID, names="p0"):
        forecast(outlook_of(Recipe.model_validate(given_), HERE), 100)


def test_another_phase_s_encoder_is_refused() -> None:
    given_ = tables()
    pretraining = {
        "kind": "fedhssl",
        "ssl": "simsiam",
        "rounds": 1,
        "batch_size": 16,
        "projector": [8, 8],
    }
    with raises(InputError, Code.CONFIG_INVALID):
        party(given_ | {"phases": [pretraining, *given_["phases"]]})


def test_with_psi_own_rows_are_counted_when_they_are_known() -> None:
    """Before joining a party cannot know which of its rows the other has, so it is refused in the
    first round.
    """
    made = party(tables(rows={"align": "psi", "labelled": 30}))
    (phase,) = made.phases
    with raises(InputError, Code.CONFIG_INVALID, names=("own_batch_size", "own_rows")):
        phase.run_round(0)


class Answers:
    """Stands in for the exchange of a step; keeps what is sent."""

    def __init__(self, received: dict[str, dict[str, Tensor]], exchange: Any = None) -> None:
        self._received, self.exchange, self.sent = received, exchange, 0

    def collect(self, _step: Any, **_sizes: int) -> dict[str, dict[str, Tensor]]:
        return self._received

    def reply(self, _step: Any, _tensors: Any) -> None:
        self.sent += 1

    send = reply


@pytest.mark.parametrize("huge", [True, False])
def test_a_gradient_that_is_not_finite_does_not_leave(huge: bool) -> None:
    """Without the check, the passive party would blame the active one."""
    made = party(tables())
    (phase,) = made.phases
    assert isinstance(phase, ActiveFedCVT)
    theirs = {"aligned": torch.rand(24, 8), "own": torch.rand(10, 8)}
    if huge:
        theirs["own"] = theirs["own"] * 3e38
    else:
        with torch.no_grad():
            for each in made.party.models["top"].parameters():
                each.fill_(torch.inf)
    answers = Answers({"p1": theirs})
    phase._representations = answers  # type: ignore[assignment]
    expected, _words = (
        (PeerError, "tensor 'own' of p1 at") if huge else (InputError, "the loss of p0 at")
    )
    with raises(expected, Code.NON_FINITE):
        phase.run_round(0)
    assert answers.sent == 0


def test_a_passive_party_that_diverged_says_so_itself() -> None:
    made = party(tables(), "p1")
    (phase,) = made.phases
    with torch.no_grad():
        for each in made.party.models["encoder"].parameters():
            each.fill_(torch.nan)
    with raises(InputError, Code.NON_FINITE, names="p1"):
        phase.run_round(0)


# -- what crosses


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["aligned", "own"]),
        ({"own_rows": "active"}, ["aligned"]),
        ({"own_batch_size": 0}, ["aligned"]),
    ],
)
def test_the_passive_party_declares_what_it_sends(
    settings: dict[str, Any], names: list[str]
) -> None:
    made = party(tables(**settings), "p1")
    swap = made.party.exchanges.opened["fedcvt", "representations"].exchange
    assert list(swap.up.tensors) == names
    assert list(swap.down.tensors) == [f"d_{name}" for name in names]
    assert set(made.party.exchanges.opened) == {
        ("fedcvt", "representations"),
        ("fedcvt", "validation"),
    }


def test_a_forecast_without_data_counts_rows() -> None:
    """80 training rows, 48 of them aligned and 30 labelled: two steps an epoch, one epoch a
    round.
    """
    found = forecast(
        outlook_of(Recipe.model_validate(tables(rows={"aligned": 0.6, "labelled": 30})), HERE), 100
    )
    links = {(link.sender, link.kind): link for link in found.links if link.phase == "fedcvt"}
    rows = 3 * (30 + 2 * (8 + 10))
    assert links["p0", "gradient"].payload_bytes == rows * 8 * 4
    # And ten validation rows a round.
    assert links["p1", "embedding"].payload_bytes == (rows + 3 * 10) * 8 * 4
    assert next(phase for phase in found.phases if phase.name == "fedcvt").round_trips == 3 * (
        2 + 1
    )
