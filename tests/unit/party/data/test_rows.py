"""How rows are divided, how long a phase trains, and which parts of an encoder are shared."""

from __future__ import annotations

import hmac
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from vfl_common.bundle import PROTOCOL, Hub, Kind, Link, StepKey
from vfl_common.config.base import parse
from vfl_common.config.models import CnnSettings, MlpSettings, NetworkSettings, TabularSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryLink, MemoryPipe
from vfl_party.align.aligned import KEPT, AlignedRows, AlignmentContext
from vfl_party.align.digest import DIVIDED, OPENING, DigestAlignment, compute_rows_digest
from vfl_party.base import seeds
from vfl_party.base.seeds import batches, draw_permutation, full_batches, split_rows
from vfl_party.base.step_timing import Clock
from vfl_party.data import Table
from vfl_party.data.rows import decode_division, divide_rows, division_of
from vfl_party.models import (
    InputSpec,
    TwoTowers,
    build_encoder,
    build_predictor,
    build_projector,
    top_state,
)
from vfl_party.models.training import TrainingSettings
from vfl_party.outbound.exchange import to_bundle
from vfl_party.outbound.policies import AllowAll


@dataclass(frozen=True)
class Found:
    """See ``vfl_party.outbound.exchange.Connections``."""

    link: Link | None = None
    hub: Hub | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    record: None = None
    protocol: int = PROTOCOL


@pytest.mark.parametrize("ids", [("1", "2"), ("1", "2", "4")])
def test_other_ids_are_refused_with_a_remedy(ids: tuple[str, ...]) -> None:
    hub = ExchangeHub(MemoryPipe("p0", ["p1"]), timeout_s=10)
    digest = torch.frombuffer(bytearray(compute_rows_digest("run", ids)), dtype=torch.uint8)
    said = to_bundle(Kind.ROWS, {"count": torch.tensor([len(ids)]), "digest": digest})
    MemoryLink(hub.pipe, "p1", timeout_s=10).send(StepKey(OPENING, 0, 0), said)
    alignment = DigestAlignment(Recipe.model_validate(cases.recipe(2)), AllowAll())
    with raises(PeerError, Code.ROWS_DIFFER, names=("p1", "p0"), party="p1") as caught:
        alignment.align(
            AlignmentContext(
                "p0", "run", Table("file.csv", ("1", "2", "3")), Path(), Found(hub=hub)
            )
        )
    # The numbers stay here.
    assert_names(caught.value.public, "p1", "p0")


def test_the_digest_of_a_list_is_the_same_in_all_releases_that_speak_a_protocol() -> None:
    slow, fast = (
        compute_rows_digest("run", ("1", "ü")),
        compute_rows_digest("run", ("1", "ü"), protocol=7),
    )
    assert fast == hmac.digest(b"run", b"\1\0\0\x001\2\0\0\0\xc3\xbc", "sha256")
    assert slow.hex() == "b4a6b16654d1766e3f8e5eda219be5a7c2eed16839de2c1aa8f2a35e7a930fdf"


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(20, 300),
    aligned=st.floats(0.1, 1.0),
    labelled=st.none() | st.integers(1, 50),
)
def test_labelled_rows_are_aligned_and_aligned_ones_are_local(
    seed: int, n: int, aligned: float, labelled: int | None
) -> None:
    splits = split_rows(seed, n, validation=0.1, test=0.2, aligned=aligned, labelled=labelled)
    train, common, local = (set(splits[name].tolist()) for name in ("train", "aligned", "local"))
    assert train <= common <= local
    assert len(common) == round(len(local) * aligned)
    assert len(train) == (len(common) if labelled is None else min(labelled, len(common)))
    held_out = set(splits["test"].tolist()) | set(splits["validation"].tolist())
    assert not held_out & local
    assert held_out | local == set(range(n))
    assert all((np.diff(rows) > 0).all() for rows in splits.values())


def divided_table(labels: Any, splits: Any = None) -> Table:
    n = len(labels)
    ids = tuple(f"{row:04d}" for row in range(n))
    return Table(
        "file.csv",
        ids,
        labels=np.array(labels),
        splits=None if splits is None else np.array(splits, object),
    )


def rows_recipe(**rows: Any) -> Recipe:
    # A recipe with folds must not have another share for tests.
    defaults = {"test": 0.2} if "folds" in rows else {}
    return Recipe.model_validate(cases.recipe(2, rows=defaults | rows))


@given(
    counts=st.lists(st.integers(1, 120), min_size=2, max_size=6),
    seed=st.integers(0, 2**32),
    labelled=st.none() | st.integers(1, 4),
)
def test_every_stratified_split_has_its_share_of_each_class(
    counts: list[int], seed: int, labelled: int | None
) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    recipe = rows_recipe(split="stratified", validation=0.1, test=0.2, labelled=labelled)
    recipe = recipe.model_copy(update={"seed": seed})
    n = len(labels)
    drawn = split_rows(seed, n, validation=0.1, test=0.2, labelled=labelled)
    if len(drawn["train"]) < (labelled or 1):
        return
    division = present(division_of(recipe, divided_table(labels)))
    splits = decode_division(division)
    assert {name: len(rows) for name, rows in splits.items()} == {
        name: len(rows) for name, rows in drawn.items()
    }
    assert all((np.diff(rows) > 0).all() for rows in splits.values())
    assert set(splits["train"]) <= set(splits["aligned"]) <= set(splits["local"])
    held_out = set(splits["test"]) | set(splits["validation"])
    assert len(held_out) + len(splits["local"]) == n == len(held_out | set(splits["local"]))
    # At a place t of the order, class c has come n_c * t times, give or take one; m rows have come
    # in all, so that c differs from its share by (1 - p) + p * (K - 1) at most, with p = n_c / n. A
    # split lies between two places.
    p = np.array(counts) / n
    most = 2 * ((1 - p) + p * (len(counts) - 1))
    for name, rows in splits.items():
        found = np.bincount(labels[rows], minlength=len(counts))
        assert (np.abs(found - len(rows) * p) <= most).all(), name


@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    folds=st.integers(2, 8),
    seed=st.integers(0, 2**32),
    split=st.sampled_from(["random", "stratified"]),
)
def test_folds_partition_the_rows_and_a_stratified_one_has_its_share_of_each_class(
    counts: list[int], folds: int, seed: int, split: str
) -> None:
    labels, n = np.repeat(np.arange(len(counts)), counts), sum(counts)
    tests: list[Any] = []
    if n < 2 * folds:
        return
    for fold in range(1, folds + 1):
        recipe = rows_recipe(split=split, validation=0.1, fold=fold, folds=folds)
        recipe = recipe.model_copy(update={"seed": seed})
        division = division_of(recipe, divided_table(labels))
        splits = divide_rows(recipe, n) if division is None else decode_division(division)
        assert len(splits["validation"]) == round(0.1 * n)
        parts = [splits[name].tolist() for name in ("test", "validation", "local")]
        assert sorted(row for rows in parts for row in rows) == list(range(n))
        tests.append(splits["test"])
    assert sorted(np.concatenate(tests)) == list(range(n))
    assert {len(rows) for rows in tests} <= {n // folds, -(-n // folds)}
    # The bound of the test above.
    p = np.array(counts) / n
    most = 2 * ((1 - p) + p * (len(counts) - 1))
    for rows in tests if split == "stratified" else []:
        found = np.bincount(labels[rows], minlength=len(counts))
        assert (np.abs(found - len(rows) * p) <= most).all()


def test_folds_that_cannot_be_are_refused() -> None:
    for rows in (
        {"folds": 5},
        {"fold": 1},
        {"folds": 5, "fold": 6},
        {"folds": 5, "fold": 0},
        {"folds": 5, "fold": 1, "split": "column"},
        {"folds": 5, "fold": 1, "test": 0.3},
        {"folds": 2, "fold": 1, "validation": 0.5},
    ):
        with raises(InputError, Code.CONFIG_INVALID):
            parse(Recipe, cases.recipe(2) | {"rows": rows}, "recipe.toml")
    with raises(InputError, Code.CONFIG_INVALID):
        divide_rows(rows_recipe(folds=5, fold=1), 4)
    with raises(InputError, Code.CONFIG_INVALID):
        division_of(rows_recipe(split="stratified", folds=5, fold=1), divided_table([0, 1, 0, 1]))


def test_a_stratified_split_is_random_within_a_class() -> None:
    table = divided_table(["b", "a"] * 100)
    one, same, other = (
        division_of(rows_recipe(split="stratified").model_copy(update={"seed": seed}), table)
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_a_column_divides_the_rows_and_the_seed_orders_the_training_rows() -> None:
    splits = ["train", "test", "train", "validation", "train"] * 20
    recipe = rows_recipe(split="column", labelled=7, aligned=0.5)
    division = present(division_of(recipe, divided_table([0] * 100, splits)))
    found = decode_division(division)
    want = np.array(splits)
    for name in ("test", "validation"):
        np.testing.assert_array_equal(found[name], np.flatnonzero(want == name))
    np.testing.assert_array_equal(found["local"], np.flatnonzero(want == "train"))
    assert (len(found["aligned"]), len(found["train"])) == (30, 7)
    assert found["train"].tolist() != found["local"][:7].tolist()


def test_rows_that_cannot_be_divided_as_the_recipe_says() -> None:
    def refused(recipe: Recipe, table: Table) -> str:
        with raises(InputError, Code.CONFIG_INVALID, Code.DATA_INVALID) as caught:
            division_of(recipe, table)
        return str(caught.value)

    refused(rows_recipe(split="column"), divided_table([0, 1]))
    for split in ("random", "stratified"):
        refused(rows_recipe(split=split), divided_table([0, 1], ["train", "test"]))
    refused(rows_recipe(split="column"), divided_table([0, 1], ["validation", "test"]))
    refused(rows_recipe(split="column", labelled=2), divided_table([0, 1], ["train", "test"]))
    regression = cases.recipe(2, task={"kind": "regression"}, rows={"split": "stratified"})
    refused(Recipe.model_validate(regression), divided_table([0.5, 1.5]))


@pytest.mark.parametrize("codes", [[3, 4, 0], [2, 5, 2]], ids=["no training rows", "no such split"])
def test_a_division_that_is_none_is_refused_and_names_its_sender(codes: list[int]) -> None:
    hub = ExchangeHub(MemoryPipe("p0", ["p1"]), timeout_s=10)
    alignment = DigestAlignment(rows_recipe(split="stratified"), AllowAll())
    link, told = MemoryLink(hub.pipe, "p1", timeout_s=10), torch.tensor(codes, dtype=torch.uint8)
    step = StepKey(OPENING, 0, 0)

    def answer() -> None:
        asking = hub.collect(step, DIVIDED.up.spec(), lambda _party, _bundle: None)
        hub.reply(step, dict.fromkeys(asking, to_bundle(Kind.ROWS, {"split": told})))

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        with raises(PeerError, Code.MALFORMED_MESSAGE, names="p0") as caught:
            alignment.align(
                AlignmentContext(
                    "p1", "run", Table("file.csv", ("1", "2", "3")), Path(), Found(link=link)
                )
            )
        answered.result()
    assert (caught.value.code, caught.value.party) == (Code.MALFORMED_MESSAGE, "p0")


def test_a_folder_keeps_the_division_for_the_same_rows_only(tmp_path: Path) -> None:
    rows = AlignedRows(("a", "b", "c"))
    assert rows.with_saved_division(tmp_path) == rows
    told = AlignedRows(rows.ids, bytes([2, 3, 4]))
    told.save(tmp_path)
    assert rows.with_saved_division(tmp_path) == told
    assert AlignedRows(("a", "b")).with_saved_division(tmp_path).division is None
    (tmp_path / KEPT).write_text("2x4")
    assert rows.with_saved_division(tmp_path) == rows


def test_fewer_labels_are_a_part_of_more() -> None:
    few, many = (
        split_rows(5, 200, validation=0.1, test=0.1, labelled=n)["train"] for n in (10, 40)
    )
    assert set(few.tolist()) < set(many.tolist())


@given(rows=st.integers(2, 200), size=st.integers(1, 64), steps=st.integers(1, 500))
def test_a_budget_of_steps_is_the_fewest_epochs_that_give_them(
    rows: int, size: int, steps: int
) -> None:
    epochs = TrainingSettings(steps=steps, batch_size=size).epochs_over(rows)
    an_epoch = len(batches(0, "p", 0, np.arange(rows), size))
    assert (epochs - 1) * an_epoch < steps <= epochs * an_epoch


@pytest.mark.parametrize("values", [{}, {"epochs": 3, "steps": 4}])
def test_a_budget_is_epochs_or_steps(values: dict[str, Any]) -> None:
    with raises(ValueError):
        TrainingSettings(**values)


def test_full_batches_leave_the_rest_out() -> None:
    cut = full_batches(1, "p", 0, np.arange(100), 32)
    assert [len(batch) for batch in cut] == [32, 32, 32]
    assert len(np.unique(np.concatenate(cut))) == 96


@pytest.mark.parametrize(
    ("settings", "spec", "below", "top"),
    [
        (MlpSettings(hidden=(7, 6)), InputSpec((5,)), {"1.", "3."}, {"5."}),
        (
            TabularSettings(kind="tabular", hidden=(7,)),
            InputSpec((3,), (4, 2)),
            {"table.", "mlp.0."},
            {"mlp.2."},
        ),
        (
            CnnSettings(kind="cnn", channels=(4, 6)),
            InputSpec((1, 8, 8)),
            {"0.", "1."},
            {"4.", "5.", "9."},
        ),
        (
            CnnSettings(kind="cnn", channels=(4, 6), shared="blocks"),
            InputSpec((1, 8, 8)),
            {"0.", "1.", "9."},
            {"4.", "5."},
        ),
        (
            NetworkSettings(kind="resnet18"),
            InputSpec((1, 8, 8)),
            {"conv1.", "bn1.", "layer1."},
            {"layer2.", "layer3.", "layer4.", "fc."},
        ),
    ],
)
def test_the_top_of_an_encoder(
    settings: object, spec: InputSpec, below: set[str], top: set[str]
) -> None:
    encoder = build_encoder(settings, spec, 8)  # type: ignore[arg-type]
    found = top_state(encoder)
    assert {prefix for prefix in top if any(name.startswith(prefix) for name in found)} == top
    assert all(name.startswith(tuple(top)) for name in found)
    rest = set(encoder.state_dict()) - set(found)
    assert {prefix for prefix in below if any(name.startswith(prefix) for name in rest)} == below
    assert not any(name.endswith("num_batches_tracked") for name in found)
    # Not copies.
    assert all(found[name].data_ptr() == encoder.state_dict()[name].data_ptr() for name in found)


def test_an_encoder_without_a_top_says_what_to_do() -> None:
    with raises(InputError, Code.MODEL_INVALID, names="top_layers"):
        top_state(nn.Linear(2, 2))


def test_two_towers_are_the_mean_or_both() -> None:
    x_BF = torch.randn(3, 5)
    cross, local = nn.Linear(5, 4), nn.Linear(5, 4)
    torch.testing.assert_close(
        TwoTowers(cross, local, "mean")(x_BF), (cross(x_BF) + local(x_BF)) / 2
    )
    assert torch.equal(
        TwoTowers(cross, local, "concat")(x_BF), torch.cat([cross(x_BF), local(x_BF)], 1)
    )


def test_heads_have_the_papers_layers() -> None:
    kinds = [type(layer).__name__ for layer in build_projector(10, (8, 8, 6))]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert build_predictor(6, 3)(build_projector(10, (8, 8, 6))(torch.randn(4, 10))).shape == (4, 6)


@pytest.mark.parametrize("n", [0, 1, 7, 10_000])
def test_the_order_is_that_of_a_stable_sort(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.random.Philox(key=5).random_raw(n)
    assert draw_permutation(5, n).tolist() == np.argsort(keys, kind="stable").tolist()
    ties = keys % 3
    monkeypatch.setattr(
        np.random, "Philox", lambda **_key: SimpleNamespace(random_raw=lambda _n: ties)
    )
    monkeypatch.setattr(seeds, "_MAX_CACHED", -1)
    assert draw_permutation(5, n).tolist() == np.argsort(ties, kind="stable").tolist()
