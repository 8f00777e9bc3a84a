"""The attack on encoders whose first weights follow from the recipe: what it finds and replays,
when it is unfit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import cases
from tests.harness.federation import toml
from tests.harness.memory import in_process
from tests.harness.present import present
from vfl_common.config.models import OptimizerSettings
from vfl_leaks.api import leaks
from vfl_leaks.attacks import initial
from vfl_leaks.attacks.initial import (
    ReplayCourse,
    ReplayedBatch,
    _add_gradients,
    _replay,
    _split_epochs,
    reconstruct_columns,
)
from vfl_leaks.fitting import r2_by_column
from vfl_leaks.rehearsal import Rehearsal
from vfl_leaks.result import Rehearsed
from vfl_leaks.table import summarize_results
from vfl_party.assembly.party import Assembled
from vfl_party.models import seed_torch

ROWS, COLUMNS, WIDTH = 60, 5, 8
COURSE = ReplayCourse(OptimizerSettings(lr=0.01), 1)


def an_encoder(seed: int, *, batch_norm: bool = False) -> nn.Module:
    with seed_torch(seed):
        norm = [nn.BatchNorm1d(16)] if batch_norm else []
        return nn.Sequential(
            nn.Linear(COLUMNS, 16), *norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, WIDTH)
        )


def an_epoch(encoder: nn.Module, x_NF: Tensor) -> list[ReplayedBatch]:
    """Embeddings without dropout, in batches of 25, 25 and 10 rows; no gradient."""
    for module in encoder.train().modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    with torch.no_grad():
        return [
            ReplayedBatch(at, z := encoder(x_NF[at]), torch.zeros_like(z))
            for at in torch.arange(ROWS).split(25)
        ]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_columns_are_found_with_the_right_weights_and_not_with_others(batch_norm: bool) -> None:
    x_NF = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    epoch = an_epoch(an_encoder(1, batch_norm=batch_norm), x_NF)
    before = torch.get_rng_state()
    for seed in (1, 2):
        encoder = an_encoder(seed, batch_norm=batch_norm)
        kept = {name: each.clone() for name, each in encoder.state_dict().items()}
        found_NF = reconstruct_columns(
            encoder, [epoch], (ROWS, COLUMNS), COURSE, torch.eye(COLUMNS)
        )
        assert all(torch.equal(kept[name], each) for name, each in encoder.state_dict().items())
        r2 = r2_by_column(found_NF, x_NF)
        assert sum(r2) / COLUMNS > 0.6 if seed == 1 else sum(r2) / COLUMNS < 0.1, r2
    assert torch.equal(torch.get_rng_state(), before)


def tables(**more: Any) -> dict[str, Any]:
    phase = {
        "epochs": 3,
        "batch_size": 32,
        "optimizer": {"lr": 0.003, "schedule": "cosine", "clip_norm": 1.0},
    }
    model = {"embedding_size": 16, "encoder": {"kind": "mlp", "hidden": [24]}}
    made = cases.recipe(2, task={"kind": "binary"}, model=model, phase=phase)
    parties = cases.columns("sklearn:breast_cancer", 2, limit=200)
    return made | {"simulate": {"parties": parties}} | more


def test_with_the_true_rows_the_replay_gives_the_weights_of_the_training(tmp_path: Path) -> None:
    made, trained = tables(), dict[str, nn.Module]()
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")

    def attach(name: str, party: Assembled) -> None:
        rehearsal.attach(name, party)
        trained[name] = party.party.models["encoder"]

    in_process(tmp_path / "run", made, made["simulate"]["parties"], attach=attach)
    scene = rehearsal.scene("p0", 1)
    beginning = scene.beginnings["p1"]
    assert beginning.known == beginning.true == made["seed"]
    epochs = _split_epochs(
        each for each in scene.embeddings["p1"]() if each.exchange == "embedding"
    )
    assert len(epochs) == 3
    rows = scene.rows["train"]
    features = rehearsal.parties["p1"].party.rows.need_features()
    (x_NF,) = features.inputs(rows)
    batches = _add_gradients(epochs, beginning, rows)
    course = ReplayCourse(beginning.optimizer, beginning.epochs)
    # The weights before a step that there was not: those at the end.
    after = [*batches, [batches[0][0]]]
    last = _replay(beginning.make(beginning.known), after, x_NF, course)[-1][0]
    for name, each in trained["p1"].named_parameters():
        assert (last[name] - each).abs().max().item() < 1e-6, name


def means(found: Rehearsed) -> Mapping[str, Any]:
    return {line.knows: line for line in found.lines if line.of == "p1: mean of columns"}


def test_a_secret_leaves_what_random_weights_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it stands what is found with the true weights, which are those of the recipe if they
    follow from it.
    """
    monkeypatch.setattr(initial, "_STEPS", 120)
    (secret,) = leaks(tables(), attacks=["initial"], quiet=True).found
    (public,) = leaks(tables(), attacks=["initial"], init="recipe", quiet=True).found
    covariance = ", covariance of 50 rows"
    told = {"the recipe", f"the recipe{covariance}"}
    assert means(public).keys() == told
    assert means(secret).keys() == told | {"the true weights", f"the true weights{covariance}"}
    # What it says in short.
    assert {knows for knows, line in means(secret).items() if not line.detail} == told
    (said, *_) = (str(each) for each in summarize_results([secret]))
    assert (
        said
        == "In short: p1: mean of columns: our attacks read almost nothing beyond chance (R² 0.00 by initial)."
    )
    for knows in told:
        line = means(secret)[knows]
        assert line.value.mean <= present(line.chance).mean + 0.02
        for found in (
            means(public)[knows],
            means(secret)[knows.replace("the recipe", "the true weights")],
        ):
            assert found.value.mean > 0.3
            assert found.chance.mean < 0.1
    # The same secrets.
    assert leaks(tables(), attacks=["norm"], quiet=True).found[0].utility == present(secret.utility)


def test_an_encoder_of_a_file_beside_the_recipe_is_attacked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(initial, "_STEPS", 5)
    code = """
        from torch import nn

        def make(spec, size):
            return nn.Sequential(nn.Linear(*spec.shape, 8), nn.Tanh(), nn.Linear(8, size))
    """
    (tmp_path / "encoder_beside.py").write_text(textwrap.dedent(code))
    custom = {"kind": "custom", "factory": "encoder_beside:make"}
    made = tables(model={"embedding_size": 8, "encoder": custom})
    (tmp_path / "recipe.toml").write_text(toml(made))
    (found,) = leaks(str(tmp_path / "recipe.toml"), attacks=["initial"], quiet=True).found
    assert means(found), found.notes


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"phases": [{"kind": "fedonce", "epochs": 1}, {"kind": "head", "epochs": 1}]},
            "no phase of kind splitnn",
        ),
        (
            {
                "phases": [
                    {"kind": "contrastive", "rounds": 1, "batch_size": 32},
                    {"kind": "splitnn", "epochs": 1},
                ]
            },
            "no encoder is trained by split training first",
        ),
        (
            {
                "simulate": {"parties": cases.digits(2)},
                "task": {"kind": "multiclass", "classes": 10},
            },
            "p1 has columns that are not numbers",
        ),
    ],
)
def test_other_recipes_are_named_below_the_table(change: dict[str, Any], why: str) -> None:
    (found,) = leaks(tables(**change), attacks=["initial"], quiet=True).found
    assert not found.lines
    assert any(why in note for note in found.notes), found.notes
