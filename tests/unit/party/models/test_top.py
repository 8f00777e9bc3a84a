"""Attention over embeddings by hand, and top models of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tests.harness.errors import raises
from vfl_common.config.base import parse
from vfl_common.config.models import CustomTop, ModelSettings, PluginTop, TopKinds, TopSettings
from vfl_common.config.party import list_factories
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.models import build_joint, build_top, combine, seed_torch
from vfl_party.models.top import AttentionPooling
from vfl_party.phases.absence import fill_missing

MODEL: dict[str, Any] = {"embedding_size": 3, "combine": "attention"}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_weights_are_those_of_the_formula() -> None:
    with seed_torch(1):
        pooling = AttentionPooling(2)
    with torch.no_grad():
        pooling.hidden.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        pooling.score.weight.copy_(torch.tensor([[3.0, -1.0]]))
    z_BKD = torch.tensor([[[0.5, 0.0], [0.0, 0.5]]])
    # 3 tanh(0.5) and -tanh(1.0).
    scores = torch.tensor([3 * 0.46211716, -0.76159416])
    want = scores.exp() / scores.exp().sum()
    torch.testing.assert_close(pooling.weights(z_BKD), want[None])
    torch.testing.assert_close(pooling(z_BKD), torch.stack([want[0] * 0.5, want[1] * 0.5])[None])


def test_a_party_that_is_away_is_masked() -> None:
    """What is left out counts as a score of minus infinity."""
    with seed_torch(2):
        pooling = AttentionPooling(3)
    own, north, south = (drawn(4, 3, seed=seed) for seed in range(3))
    widths = {"north": 3, "south": 3}
    there = combine(
        "attention",
        fill_missing("skip", "attention", [own], {"north": None, "south": south}, widths),
    )
    assert there.shape == (4, 2, 3)
    all_BKD = torch.stack([own, north, south], dim=1)
    scores_BK = pooling.score(torch.tanh(pooling.hidden(all_BKD))).squeeze(2)
    scores_BK[:, 1] = -torch.inf
    masked_BD = (scores_BK.softmax(1).unsqueeze(2) * all_BKD).sum(1)
    torch.testing.assert_close(pooling(there), masked_BD)
    # A row of zeros takes part, with a score of 0.
    zeros = combine(
        "attention",
        fill_missing("zeros", "attention", [own], {"north": None, "south": south}, widths),
    )
    assert zeros.shape == (4, 3, 3)
    assert not torch.allclose(pooling(zeros), masked_BD)
    # One party alone has weight 1.
    torch.testing.assert_close(pooling(own[:, None]), own)


def test_the_order_of_parties_does_not_count() -> None:
    with seed_torch(3):
        pooling = AttentionPooling(5)
    z_BKD = drawn(6, 4, 5)
    torch.testing.assert_close(pooling(z_BKD), pooling(z_BKD[:, [2, 0, 3, 1]]))


def test_the_pooling_comes_before_the_top_model_and_learns() -> None:
    with seed_torch(4):
        joint = build_joint(ModelSettings.model_validate(MODEL), [3] * 3, 2)
    names = ["0.hidden.weight", "0.score.weight", "1.0.weight", "1.0.bias"]
    assert list(joint.state_dict()) == names
    joint(drawn(7, 3, 3)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in joint.parameters())
    with seed_torch(4):
        plain = build_joint(ModelSettings(embedding_size=3, combine="sum"), [3] * 3, 2)
    assert list(plain.state_dict()) == ["0.weight", "0.bias"]


def of(values: dict[str, Any]) -> TopKinds:
    found: TopKinds = TypeAdapter(TopKinds).validate_python(values)
    return found


def test_kinds_of_top_models_are_told_apart() -> None:
    assert of({}) == TopSettings()
    assert of({"hidden": [4]}) == of({"kind": "mlp", "hidden": [4]}) == TopSettings(hidden=(4,))
    mine = {"kind": "custom", "factory": "user_tops:make", "options": {"width": 3}}
    assert of(mine) == CustomTop(kind="custom", factory="user_tops:make", options={"width": 3})
    assert of({"kind": "mine", "depth": 2}) == PluginTop(kind="mine", settings={"depth": 2})
    model = ModelSettings.model_validate(MODEL | {"top": mine})
    # As a run's folder has it.
    assert ModelSettings.model_validate(model.model_dump(mode="json")) == model
    for wrong in ({"hiden": [3]}, {"kind": "custom", "factory": "no colon"}, {"kind": "custom"}):
        with raises(InputError, Code.CONFIG_INVALID):
            parse(ModelSettings, MODEL | {"top": wrong}, "recipe")


def test_recipes_of_before_have_the_digest_of_before() -> None:
    tables: dict[str, Any] = {
        "name": "two",
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "model": {"embedding_size": 4, "top": {"hidden": [6]}},
        "phases": [{"kind": "splitnn", "epochs": 2}],
    }
    recipe = Recipe.model_validate(tables)
    assert '"top":{"dropout":0.0,"hidden":[6]}' in recipe.canonical_json()
    own = {"kind": "custom", "factory": "net:top"}
    encoder = {"kind": "custom", "factory": "net:encoder"}
    tables["model"] |= {"top": own, "encoder": encoder}
    recipe = Recipe.model_validate(tables)
    assert '"top":{"factory":"net:top","kind":"custom"}' in recipe.canonical_json()
    assert list_factories(recipe, "bank") == ["net:encoder", "net:top"]
    assert list_factories(recipe, "bank", own_encoder=True) == ["net:top"]
    assert list_factories(recipe, "shop") == ["net:encoder"]


@pytest.fixture
def user_tops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_tops.py").write_text(
        """
from torch import nn

class Lambda(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x):
        return self.f(x)

def make(width, outputs, hidden=4):
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
def number(width, outputs): return 3
def fails(width, outputs): raise RuntimeError("no\\nreally")
def narrow(width, outputs): return nn.Linear(width, outputs + 1)
def other(width, outputs): return nn.Linear(width + 1, outputs)
def double(width, outputs): return nn.Linear(width, outputs).double()
def pair(width, outputs): return Lambda(lambda x: (x, x))
def float64(width, outputs): return Lambda(lambda x: x[:, :outputs].double())
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_tops", raising=False)


def test_a_top_model_of_one_s_own_takes_what_is_combined(user_tops: None) -> None:
    custom = CustomTop(kind="custom", factory="user_tops:make", options={"hidden": 7})
    before = torch.get_rng_state()
    with seed_torch(5):
        top = build_top(custom, 12, 3)
        after = torch.get_rng_state()
    with seed_torch(5):
        same = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))
        # The check has drawn nothing.
        assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(before, torch.get_rng_state())
    assert top.training
    x = drawn(5, 12)
    assert torch.equal(top(x), same(x))
    joint = build_joint(ModelSettings.model_validate(MODEL | {"top": custom}), [3] * 4, 2)
    assert joint(drawn(5, 4, 3)).shape == (5, 2)


@pytest.mark.parametrize(
    "name", ["missing", "number", "fails", "narrow", "other", "double", "pair", "float64"]
)
def test_what_is_no_top_model_is_refused_in_one_sentence(name: str, user_tops: None) -> None:
    with raises(InputError, Code.MODEL_INVALID):
        build_top(CustomTop(kind="custom", factory=f"user_tops:{name}"), 6, 2)
