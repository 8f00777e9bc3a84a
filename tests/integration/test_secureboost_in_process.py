"""SecureBoost refuses what cannot be used in one sentence, from people and from peers; and its
small parts.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.federation import toml
from vfl.forecasting.show import count_forecast
from vfl.simulation.inprocess import run_in_process
from vfl.simulation.run import simulate
from vfl.summary.table import describe_encryption, print_tables
from vfl_common.config.data import DataSettings
from vfl_common.config.party import TreeLimits
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError, PeerError, VflError
from vfl_common.summary import Summary
from vfl_party.assembly.party import assemble, expect_rows, open_party
from vfl_party.base.seeds import split_rows
from vfl_party.data.rows import prepare
from vfl_party.data.table import Categories, Table
from vfl_party.homomorphic.scheme import PlainAdder, PlainKeys
from vfl_party.homomorphic.sums import SummingHere, sum_entries
from vfl_party.methods.secureboost import active, common, forest, guard, passive
from vfl_party.methods.secureboost.columns import ELSEWHERE, Column, Layout, Offer, cuts, plan_of
from vfl_party.methods.secureboost.forest import (
    SETTLED,
    Forest,
    Tree,
    TreeSplit,
    choose_summed_nodes,
)
from vfl_party.methods.secureboost.growing import (
    BestSplit,
    Fixed,
    GrowingTree,
    by_gradient,
    count_parts,
)
from vfl_party.methods.secureboost.joint_walk import Walk
from vfl_party.methods.secureboost.settings import GossSettings, SecureBoostSettings
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Encrypted
from vfl_party.phases.course import Course
from vfl_party.predict import trained
from vfl_party.predict.prediction import plan_exchanges
from vfl_party.runtime.preflight import check

ROWS = 80


def write(folder: Path, **columns: list[Any]) -> None:
    draw = np.random.default_rng(0)
    table: dict[str, list[Any]] = {
        f"x{c}": draw.normal(size=ROWS).round(2).tolist() for c in range(4)
    }
    table["y"] = [int(a + b > 0) for a, b in zip(table["x0"], table["x2"], strict=True)]
    table |= columns
    lines = [",".join(["id", *table])]
    lines += [
        ",".join([f"r{n:03d}", *(str(column[n]) for column in table.values())]) for n in range(ROWS)
    ]
    (folder / "all.csv").write_text("\n".join(lines) + "\n")


def recipe(**phase: Any) -> Recipe:
    settings = {"kind": "secureboost", "trees": 2, "encryption": "none", "bins": 8} | phase
    return Recipe.model_validate(cases.recipe(2, task={"kind": "binary"}) | {"phases": [settings]})


def data(folder: Path, *more: str) -> dict[str, DataSettings]:
    source = str(folder / "all.csv")
    return {
        "p0": DataSettings(source=source, id=("id",), columns=("x0", "x1"), label="y"),
        "p1": DataSettings(source=source, id=("id",), columns=("x2", "x3", *more)),
    }


def run(folder: Path, made: Recipe, *more: str) -> Summary:
    return run_in_process(made, data(folder, *more), folder / "run")


def refused(folder: Path, made: Recipe, name: str, *more: str, policy: Any = None) -> str:
    with raises(InputError, Code.CONFIG_INVALID, Code.DATA_INVALID, Code.REFUSED) as caught:
        opened = open_party(made, name, data(folder, *more)[name], made.model.encoder)
        assemble(opened, expect_rows(opened), policy=policy)
    return str(caught.value)


# -- people


def test_a_party_whose_columns_are_all_constant_is_refused(tmp_path: Path) -> None:
    write(tmp_path, x2=[1] * ROWS, x3=[2] * ROWS)
    refused(tmp_path, recipe(), "p1")


def test_a_column_without_any_cell_is_constant(tmp_path: Path) -> None:
    write(tmp_path, x2=[1] * ROWS, x3=[""] * ROWS)
    refused(tmp_path, recipe(), "p1")


@pytest.mark.parametrize(("exchange", "sent_by"), [("sums", "passive"), ("gradients", "active")])
def test_a_transform_of_ciphertexts_is_refused(exchange: str, sent_by: str, tmp_path: Path) -> None:
    write(tmp_path)
    noise = {"kind": "gaussian", "exchange": exchange, "sent_by": sent_by, "sigma": 0.1}
    refused(tmp_path, recipe(transforms=[noise]), "p0")


def test_a_constant_column_is_noted_at_home_and_changes_no_tree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, same=[3] * ROWS)
    with_it = run(tmp_path, recipe(), "same").metrics["test"]
    assert any(
        "'same'" in line.getMessage() and "constant" in line.getMessage() for line in caplog.records
    )
    (tmp_path / "run").rename(tmp_path / "before")
    assert run(tmp_path, recipe()).metrics["test"] == with_it


def test_training_labels_of_one_class_are_refused(tmp_path: Path) -> None:
    made = recipe()
    test = split_rows(made.seed, ROWS, validation=0.1, test=0.1)["test"]
    write(tmp_path, y=[int(n == test[0]) for n in range(ROWS)])
    refused(tmp_path, made, "p0")


def test_a_column_of_many_categories_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    write(tmp_path, word=[f"w{n}" for n in draw.permutation(ROWS)])
    monkeypatch.setattr("vfl_party.methods.secureboost.columns.MAX_CODES", 10)
    refused(tmp_path, recipe(), "p1", "word")


@pytest.mark.parametrize(
    "phase",
    [
        {"depth": 9},
        {"leaves": 9},
        {"bins": 400},
        {"encryption": "rsa"},
        {"key_bits": 512},
        {"lambda": -1},
        {"goss": {"top": 0.6, "rest": 0.5}},
        {"goss": {"top": 0.0}},
        {"goss": {}, "row_sample": 0.5},
    ],
)
def test_settings_that_cannot_be_are_refused(phase: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path)
    refused(tmp_path, recipe(**phase), "p0")


def test_early_stopping_needs_validation_rows(tmp_path: Path) -> None:
    write(tmp_path)
    made = recipe(early_stopping=2)
    made = made.model_copy(update={"rows": made.rows.model_copy(update={"validation": 0.0})})
    refused(tmp_path, made, "p1")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"phases": [{"kind": "evaluate"}, {"kind": "secureboost"}]},
            "phases: evaluate: a phase of kind 'secureboost' evaluates its model itself. Remove evaluate.",
        ),
        (
            {
                "phases": [{"kind": "secureboost"}],
                "start": {"run": "earlier", "phases": [{"kind": "splitnn"}]},
            },
            "start: a phase of kind 'secureboost' trains its own model, and cannot "
            "start from an earlier run. Remove start (in a study: pretrain).",
        ),
    ],
)
@pytest.mark.parametrize("with_model", [True, False])
def test_what_can_never_run_is_refused_before_anything_starts(
    wrong: dict[str, Any], text: str, with_model: bool, tmp_path: Path
) -> None:
    """``vfl simulate``, ``vfl forecast`` and ``vfl-party check`` say the same; no party starts. The
    server knows no methods.
    """
    tables = (
        cases.recipe(2, task={"kind": "binary"})
        | wrong
        | {"simulate": {"data": {"source": "all.csv"}}}
    )
    path = tmp_path / "recipe.toml"
    path.write_text(
        toml({key: value for key, value in tables.items() if key != "model" or with_model})
    )
    party = tmp_path / "p0.toml"
    party.write_text('name = "p0"\nrecipe = "recipe.toml"\nserver = "127.0.0.1:9"\n')
    party.write_text(
        party.read_text() + 'tls = { ca = "ca.pem", certificate = "p0.pem", key = "p0.key" }\n'
    )
    with pytest.raises(InputError) as simulated:
        simulate(path, tmp_path / "runs")
    with pytest.raises(InputError) as forecast:
        count_forecast(path)
    said = [str(each.value) for each in (simulated, forecast)]
    said += [
        each.text
        for each in check(party, None, offline=True)
        if not each.fine and each.about != "certificate"
    ]
    if not with_model and "start" not in wrong:
        text = "model: missing. Add it."
    assert said == [f"{path}: {text}"] * 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["p0", "p1"])
def test_a_policy_refuses_gradients_that_are_not_encrypted(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    refused(tmp_path, recipe(), name, policy=Encrypted())
    made = recipe(encryption="paillier")
    opened = open_party(made, name, data(tmp_path)[name], made.model.encoder)
    party = assemble(opened, expect_rows(opened), policy=Encrypted())
    assert any("ciphertexts" in line.sent for line in party.leaves)


def test_no_encryption_is_said_in_check_log_and_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    summary = run(tmp_path, recipe())
    assert any("can read every gradient" in line.getMessage() for line in caplog.records)
    assert any("unencrypted" in each.sent for each in summary.exchanges)
    assert_names(describe_encryption(summary), "secureboost")
    assert [each.carries for each in summary.exchanges if each.how] == [
        "gradient unencrypted uint8 [rows, bytes] (NOT encrypted), may carry label information",
        "gradient unencrypted uint8 [sums, bytes] (NOT encrypted)",
    ]


def test_summary_and_report_say_which_scheme_and_how_many_bits(tmp_path: Path) -> None:
    write(tmp_path)
    summary = run(tmp_path, recipe(encryption="paillier", key_bits=1024, trees=1, depth=1))
    words = "encrypted by Paillier, 1,024 bits"
    encrypted = [(each.exchange, each.sender) for each in summary.exchanges if each.how == words]
    # Not the sizes, nor what was chosen.
    assert encrypted == [("gradients", "p0"), ("sums", "passive parties")]
    console = Console(file=io.StringIO(), width=200)
    print_tables(summary, console=console)
    assert f"Gradients of secureboost left {words}." in console.file.getvalue()  # type: ignore[attr-defined]


def test_chosen_rows_have_the_largest_gradients_and_weights_that_make_up_for_the_rest() -> None:
    sizes = np.abs(np.random.default_rng(5).normal(size=200))
    rows, weights = by_gradient(GossSettings(top=0.2, rest=0.1), sizes, seed=3)
    kept, picked = rows[weights == 1.0], rows[weights != 1.0]
    assert sorted(kept) == sorted(np.argsort(-sizes)[:40])
    assert len(picked) == 20
    assert weights.sum() == pytest.approx(200.0)
    assert rows.tolist() == sorted(set(rows.tolist()))


def test_every_row_that_is_not_kept_is_drawn_as_often() -> None:
    """The weighted sum over 400 draws is the sum over all rows: GOSS is unbiased for the others."""
    values, sizes = np.arange(50.0), np.arange(50.0)
    sums = []
    for seed in range(400):
        rows, weights = by_gradient(GossSettings(top=0.2, rest=0.2), sizes, seed)
        sums.append(float((values[rows] * weights).sum()))
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - values.sum()) < 4 * error


@pytest.mark.parametrize("count", [2, 3, 5, 50])
def test_chosen_rows_are_as_many_as_both_sides_expect(count: int) -> None:
    for goss in (
        GossSettings(),
        GossSettings(top=0.99, rest=0.01),
        GossSettings(top=0.01, rest=0.01),
    ):
        rows, weights = by_gradient(goss, np.ones(count), seed=1)
        assert 2 <= len(rows) == sum(count_parts(count, goss)) <= count
        assert np.isfinite(weights).all()


def test_columns_that_offer_too_many_splits_are_refused_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setattr(common, "MAX_ENTRIES", 5)
    refused(tmp_path, recipe(bins=7), "p1")


# -- peers


def peer_fails(folder: Path, made: Recipe) -> str:
    write(folder)
    with raises(
        PeerError, Code.MALFORMED_MESSAGE, Code.TENSOR_MISMATCH, Code.TENSOR_TOO_LARGE
    ) as caught:
        run(folder, made)
    return str(caught.value)


def test_sizes_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(passive.ShuffledEntries):
        def __init__(self, layout: Layout, columns: list[Column]) -> None:
            super().__init__(layout, columns)
            self.sizes = [1 << 40, *self.sizes[1:]]

    monkeypatch.setattr(passive, "ShuffledEntries", Wrong)
    peer_fails(tmp_path, recipe())


@pytest.mark.parametrize(
    "change",
    [
        lambda wire: np.concatenate([wire, wire[:1]]),
        lambda wire: wire[:, :-1],
        lambda wire: wire + np.uint8(1),
        lambda wire: np.full_like(wire, 255),
    ],
    ids=["too-many", "another-size", "other-sums", "out-of-range"],
)
def test_sums_that_cannot_be_are_refused(
    change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlainAdder.wire
    monkeypatch.setattr(PlainAdder, "wire", lambda self, held: change(real(self, held)))
    peer_fails(tmp_path, recipe())


def test_too_few_chosen_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(*given: Any) -> Any:
        rows, weights = by_gradient(*given)
        return rows[1:], weights[1:]

    monkeypatch.setattr(active, "by_gradient", fewer)
    peer_fails(tmp_path, recipe(goss={"top": 0.25, "rest": 0.25}))


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("bits", [0, 255, 0x5A])
def test_rows_that_go_another_way_than_their_sums_are_refused(
    bits: int, weight: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Asking.swap

    def lie(self: Any, step: Any, tensors: dict[str, Any], *rows: Any, **sizes: Any) -> Any:
        told = (
            {"left": torch.full_like(tensors["left"], bits)}
            if self.exchange.name == "partition"
            else tensors
        )
        return real(self, step, told, *rows, **sizes)

    monkeypatch.setattr(Asking, "swap", lie)
    peer_fails(tmp_path, recipe(min_child_weight=weight))


def test_sums_of_g_that_no_rows_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wire(self: PlainAdder, held: Any) -> Any:
        sums = held.copy()
        sums[:, 0] = (1 << 62) - 1
        return sums.astype("<i8").view(np.uint8).reshape(len(sums), 16)

    monkeypatch.setattr(PlainAdder, "wire", wire)
    peer_fails(tmp_path, recipe())


def test_a_gradient_out_of_range_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PlainKeys, "encrypt", lambda self, g, h: np.full((len(g), 16), 255, np.uint8)
    )
    peer_fails(tmp_path, recipe())


def test_a_key_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "make_keys", lambda *_args, **_more: (PlainKeys(), b"X"))
    peer_fails(tmp_path, recipe(encryption="paillier", key_bits=1024))


def test_rows_in_no_child_of_their_node_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GrowingTree.settle

    def wrong(of: Any, level: int, lefts: Any) -> None:
        real(of, level, lefts)
        of.nodes[of.nodes != SETTLED] += 4

    monkeypatch.setattr(GrowingTree, "settle", wrong)
    peer_fails(tmp_path, recipe())


def test_a_walk_through_splits_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Walk.answer

    def forgetful(self: Any, *args: Any) -> int:
        for tree in self._forest.trees:
            tree.splits.clear()
        return real(self, *args)

    monkeypatch.setattr(Walk, "answer", forgetful)
    peer_fails(tmp_path, recipe())


def test_a_walk_on_which_a_row_is_somewhere_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active party that says the contrary of p1's bits would read bits of splits that the row
    never meets.
    """
    real = Answering.collect

    def contrary(self: Any, *given: Any, **sizes: Any) -> Any:
        received = real(self, *given, **sizes)
        if self.exchange.name == "walk":
            received = {party: {"left": each["left"] ^ 255} for party, each in received.items()}
        return received

    monkeypatch.setattr(Answering, "collect", contrary)
    peer_fails(tmp_path, recipe(trees=4))


def test_the_nearest_own_split_above_a_node_says_where_its_rows_come_from() -> None:
    split = TreeSplit(0, (True, False), True)
    tree = Tree({(0, 0): split, (2, 3): split})
    nodes = ((0, 0), (1, 0), (1, 1), (2, 3), (3, 6), (3, 7))
    assert [forest._entrance(tree, *node) for node in nodes] == [1, 2, 3, 3, 14, 15]
    assert forest._entrance(Tree({(1, 0): split}), 2, 3) == 1


@pytest.mark.parametrize("level", [0, 2])
def test_a_split_with_few_rows_on_a_side_is_refused_before_it_is_answered(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active party that names winners as it likes cannot ask for single rows."""
    real = GrowingTree.best_splits

    def lie(of: Any, present: Any, entries: Any) -> Any:
        if level and present == [0]:
            return real(of, present, entries)
        found = {}
        for node in present:
            h = entries["p1"][node].h
            of_some_rows = np.where(h > 0, h, h.max())
            found[node] = "p1", BestSplit(1.0, np.arange(len(h)) == of_some_rows.argmin())
        return found

    monkeypatch.setattr(GrowingTree, "best_splits", lie)
    peer_fails(tmp_path, recipe(bins=30, depth=4))


NODES = np.array([0] * 8 + [1] * 8 + [SETTLED] * 4, np.uint8)
REGISTRY = [SETTLED] * 8


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, ""),
        (REGISTRY + [SETTLED] * 3 + [3] * 5, ""),
        ([0] * 4 + [1] * 4 + [2] * 4 + [1] * 4, "a row is not in a child of its node"),
        (
            [0] * 3 + [1] * 5 + [2] * 4 + [3] * 4,
            "a row is not on the side to which its split sent it",
        ),
        ([*REGISTRY, *[3] * 8], "the rows of a node do not go to two children"),
        (
            REGISTRY + [2] * 3 + [3] * 3 + [SETTLED] * 2,
            "the rows of a node do not go to two children",
        ),
        (
            REGISTRY + [2] + [3] * 7,
            "a node has too few rows that the tree learns from (got 1, an honest one has at least 3)",
        ),
        (
            REGISTRY + [SETTLED] + [3] * 7,
            "a node has too few rows that the tree learns from (got 1, an honest one has at least 2)",
        ),
    ],
)
def test_rows_that_no_honest_tree_divides_so_are_refused(moved: list[int], words: str) -> None:
    """p1 has split node 0 in the middle, somebody else node 1. The sums of a child say those of its
    brother, too.
    """
    own = {0: np.arange(8) < 4}
    rows = np.array([*moved, *[SETTLED] * 4], np.uint8)
    assert (
        guard.find_wrong_children(NODES, rows, np.ones(20, bool), own, fewest=2, fewest_open=3)
        == words
    )


def test_children_of_one_row_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GrowingTree.settle

    def alone(of: Any, level: int, lefts: Any) -> None:
        before = of.nodes.copy()
        real(of, level, lefts)
        for node in lefts:
            if of.tree.owners[level - 1, node] == "p0":
                rows = np.flatnonzero(before == node)
                of.nodes[rows] = 2 * node
                of.nodes[rows[:1]] = 2 * node + 1

    monkeypatch.setattr(GrowingTree, "settle", alone)
    peer_fails(tmp_path, recipe())


@pytest.mark.parametrize(
    ("task", "phase", "sides", "rows"),
    [
        ("binary", {}, 1, 4),
        ("binary", {}, 2, 8),
        ("multiclass", {"min_child_weight": 2.5}, 1, 5),
        ("regression", {}, 1, 1),
        ("regression", {"min_child_weight": 20.0}, 1, 20),
        ("binary", {"min_child_weight": 0.0}, 2, 1),
        # A drawn row counts four.
        ("binary", {"goss": {"top": 0.2, "rest": 0.2}, "min_child_weight": 10.0}, 1, 10),
    ],
)
def test_the_fewest_rows_of_a_side_follow_from_the_recipe(
    task: Any, phase: dict[str, Any], sides: int, rows: int
) -> None:
    settings = SecureBoostSettings.model_validate(phase)
    of = TaskSettings(kind=task, classes=3 if task == "multiclass" else None)
    assert guard.min_rows(of, settings, 100, sides) == rows


def test_an_interruption_is_no_new_question(tmp_path: Path) -> None:
    """What was answered is known after a restart, even if the last line is torn; the same question
    is free.
    """
    first = guard.AnswerLog()
    first.keep(tmp_path)
    assert first.is_repeated("secureboost/tree-0/0", b"rows", b"bits")
    assert first.is_repeated("secureboost/tree-0/1", b"rows", b"bits")
    file = tmp_path / guard.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text()[:-9])
    again = guard.AnswerLog()
    again.keep(tmp_path)
    assert again.is_repeated("secureboost/tree-0/0", b"rows", b"bits")
    assert not again.is_repeated("secureboost/tree-0/0", b"rows", b"others")
    assert not again.is_repeated("secureboost/tree-0/0", b"rowsb", b"its")
    # That line was torn: nobody knows it any more.
    assert again.is_repeated("secureboost/tree-0/1", b"rows", b"others")
    once_more = guard.AnswerLog()
    once_more.keep(tmp_path)
    assert not once_more.is_repeated("secureboost/tree-0/1", b"rows", b"bits")


@pytest.mark.parametrize("slot", ["tree-1/0", "walk-1"])
def test_other_splits_after_an_interruption_are_refused(
    slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = guard.AnswerLog.keep

    def returned(self: Any, folder: Path) -> None:
        (folder / guard.FILE).write_text(f"secureboost/{slot} {'0' * 64}\n")
        real(self, folder)

    monkeypatch.setattr(guard.AnswerLog, "keep", returned)
    peer_fails(tmp_path, recipe())


def test_columns_that_cannot_be_declared_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Offer.facts
    monkeypatch.setattr(Offer, "facts", lambda self: [self.numbers, 1 << 17, *real(self)[2:]])
    peer_fails(tmp_path, recipe())


def test_other_columns_after_an_interruption_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = active.ActiveSecureBoost._open

    def resumed(self: Any, round_: int) -> None:
        one_more = Offer.of([Column("x", (0.5,))])
        state = {
            "scores": torch.zeros(1, 1),
            "best": 0,
            "least": 1.0,
            "offers": {"p1": one_more.facts()},
        }
        kept = self._scores_NK
        self.load_state(state)
        self._scores_NK = kept
        real(self, round_)

    monkeypatch.setattr(active.ActiveSecureBoost, "_open", resumed)
    peer_fails(tmp_path, recipe())


@pytest.mark.parametrize(
    ("sizes", "sample", "fits"),
    [
        ([14, 3, 0, 2], 1.0, True),
        # In any order.
        ([14, 2, 3, 0], 1.0, True),
        ([13, 3, 0, 2], 1.0, False),
        ([14, 3, 3, 2], 1.0, False),
        ([7, 3, 0, 0], 0.4, True),
        ([14, 0, 0, 0], 0.4, True),
        ([14, 3, 0, 4], 0.4, False),
        ([15, 0, 0, 0], 0.4, False),
        ([-1, 3, 0, 2], 1.0, False),
        ([14, 1 << 62, 1 << 62, 0], 1.0, False),
    ],
)
def test_a_tree_has_the_entries_that_were_declared(
    sizes: list[int], sample: float, fits: bool
) -> None:
    words = [Column("w", categories=tuple(range(size))) for size in (3, 1, 2)]
    offer = Offer.of([Column("x", tuple(range(7))), Column("z", tuple(range(7))), *words])
    settings = SecureBoostSettings(bins=8, column_sample=sample)
    assert Offer.read(offer.facts(), settings) == offer
    assert str(offer) == "14 splits of 2 numeric columns, and 3 categorical columns"
    assert offer.allows(np.array(sizes), settings) == fits


def test_more_splits_than_declared_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passive party that invents columns for one tree, such as random ones, would read labels
    from the winners.
    """

    class Inventive(passive.ShuffledEntries):
        def __init__(self, layout: Layout, columns: list[Column]) -> None:
            super().__init__(layout, columns)
            self.order += self.order
            self.sizes = [len(self.order), *self.sizes[1:]]

    monkeypatch.setattr(passive, "ShuffledEntries", Inventive)
    peer_fails(tmp_path, recipe())


def test_sums_of_categories_that_leave_rows_out_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, word=["abc"[n % 3] for n in range(ROWS)])

    class Without(SummingHere):
        def sums(self, members: Any) -> Any:
            found = super().sums(members)
            for each in found:
                each[-1] = 0
            return found

    monkeypatch.setattr(passive, "make_summing", lambda _shards, *given: Without(*given))
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        run(tmp_path, recipe(), "word")


# -- what a party file asks for


def asked(folder: Path, name: str, made: Recipe, **trees: Any) -> str:
    """Returns why a party refuses a recipe; '' if it does not."""
    write(folder)
    opened = open_party(made, name, data(folder)[name], made.model.encoder)
    try:
        assemble(opened, expect_rows(opened), trees=TreeLimits.model_validate(trees))
    except InputError as error:
        return str(error) if error.code is Code.REFUSED else f"of another kind: {error}"
    return ""


def test_a_recipe_that_gives_less_than_a_party_file_asks_for_is_refused(tmp_path: Path) -> None:
    text = asked(tmp_path, "p1", recipe(), least_rows=20)
    assert_names(text, "trees.least_rows", "min_child_weight")
    assert not asked(tmp_path, "p1", recipe(min_child_weight=5.0), least_rows=20)
    text = asked(tmp_path, "p1", recipe(trees=10), most_bits=29)
    assert_names(text, "trees.most_bits", "p1")
    assert not asked(tmp_path, "p1", recipe(trees=10), most_bits=30)
    assert "got 60" in asked(tmp_path, "p1", recipe(trees=10, splits=["train"]), most_bits=59)
    # It answers nothing.
    assert not asked(tmp_path, "p0", recipe(), least_rows=20, most_bits=1)


@pytest.mark.parametrize("name", ["p0", "p1"])
def test_short_keys_are_for_trials(name: str, tmp_path: Path) -> None:
    text = asked(tmp_path, name, recipe(encryption="paillier", key_bits=1024))
    assert_names(text, "trees.least_key_bits", "1024")
    assert not asked(
        tmp_path, name, recipe(encryption="paillier", key_bits=1024), least_key_bits=1024
    )
    assert not asked(tmp_path, name, recipe(encryption="paillier", key_bits=2048))


# -- afterwards


def test_trees_are_exported_with_the_partys_models(tmp_path: Path) -> None:
    write(tmp_path)
    run(tmp_path, recipe())
    for name in ("p0", "p1"):
        whole = trained.load(tmp_path / "run", name)
        whole.save(tmp_path / f"{name}.safetensors")
        again = trained.load(tmp_path / f"{name}.safetensors", name)
        forest, other = whole.models["trees"], again.models["trees"]
        assert isinstance(forest, Forest)
        assert isinstance(other, Forest)
        assert len(forest.trees) == 2
        assert forest.trees == other.trees


def test_a_run_of_trees_has_no_encoder_and_no_embeddings(tmp_path: Path) -> None:
    write(tmp_path)
    run(tmp_path, recipe())
    whole = trained.load(tmp_path / "run", "p1")
    assert list(whole.models) == ["trees"]
    with raises(InputError, Code.CONFIG_INVALID):
        whole.embed({"x2": [0.0], "x3": [1.0]})


def test_a_recipe_of_trees_needs_no_model() -> None:
    tables = {
        key: value for key, value in recipe().model_dump(mode="json").items() if key != "model"
    }
    assert Recipe.model_validate(tables).model.embedding_size == 1
    split = Recipe.model_validate(tables | {"phases": [{"kind": "splitnn", "epochs": 1}]})
    with raises(InputError, Code.CONFIG_INVALID):
        Course(split).check()


def test_missing_numbers_need_no_setting(tmp_path: Path) -> None:
    write(tmp_path, x2=[None if n % 7 == 0 else n % 11 for n in range(ROWS)])
    text = (tmp_path / "all.csv").read_text().replace("None", "")
    (tmp_path / "all.csv").write_text(text)
    summary = run(tmp_path, recipe())
    assert summary.metrics["test"]
    forest = trained.load(tmp_path / "run", "p1").models["trees"]
    assert isinstance(forest, Forest)
    assert [column.missing for column in forest.columns] == [True, False]
    own = data(tmp_path)
    own["p1"] = DataSettings(
        **{**own["p1"].model_dump(include={"source", "id", "columns"}), "missing": "error"}
    )
    with raises(InputError, Code.DATA_INVALID, names=("x2", "all.csv")):
        run_in_process(recipe(), own, tmp_path / "refused")


def test_check_says_what_a_prediction_sends(tmp_path: Path) -> None:
    write(tmp_path)
    made = recipe()
    for name, sent in (
        ("p0", "rows nodes uint8 [rows, trees]"),
        ("p1", "rows left uint8 [packed]"),
    ):
        opened = open_party(made, name, data(tmp_path)[name], made.model.encoder)
        party = assemble(opened, expect_rows(opened))
        before = party.exchanges
        (line,) = plan_exchanges(party.party)
        assert (line.exchange, line.sent) == ("walk", sent)
        assert party.exchanges == before


# -- parts


def test_cuts_are_halfway_and_at_most_one_fewer_than_bins() -> None:
    assert cuts(np.array([3.0, 1.0, 1.0, 2.0]), 8) == [1.5, 2.5]
    assert cuts(np.array([5.0, 5.0]), 8) == []
    assert cuts(np.empty(0), 8) == []
    found = cuts(np.arange(1000.0), 10)
    assert len(found) == 9
    assert found[0] == 99.5


def test_codes_of_missing_and_unknown_cells() -> None:
    number = Column("x", (0.5, 1.5), missing=True)
    assert number.codes(np.array([0.0, 1.0, 2.0, np.nan])).tolist() == [0, 1, 2, 3]
    assert Column("x", (0.5,)).codes(np.array([np.nan])).tolist() == [ELSEWHERE]
    assert Column("w", categories=(1, 4, 7)).codes(np.array([4, 5, 1, 9])).tolist() == [
        1,
        ELSEWHERE,
        0,
        ELSEWHERE,
    ]


def test_entries_sum_prefixes_with_and_without_missing_and_single_categories() -> None:
    columns = [Column("x", (0.5, 1.5), missing=True), Column("w", categories=(1, 2))]
    layout = Layout.of(columns, [0, 1])
    assert layout.sizes == (5, 2)
    codes = np.array([[0, 0], [1, 1], [2, 0], [3, 1]], np.int8)
    pairs = np.array([[1, 1], [10, 1], [100, 1], [1000, 1]])
    got = sum_entries(PlainAdder(), pairs, np.arange(4), codes, plan_of(columns, layout))
    assert got[:, 0].tolist() == [1, 11, 1001, 1011, 111, 101, 1010]
    flags = np.array([False, False, True, True, False, False, False])
    assert layout.choose_left(columns, flags) == (0, [True, False, False, True])


def test_of_two_brothers_the_one_with_fewer_rows_is_summed() -> None:
    nodes = np.array([0, 0, 1, 2, 3, 3, 5, SETTLED], np.uint8)
    assert choose_summed_nodes(nodes, np.ones(8, bool)) == [1, 2, 5]


def test_fixed_point_leaves_room_for_all_rows() -> None:
    g = np.full(100_000, -3.7)
    fixed = Fixed.of(g, np.ones(100_000))
    assert abs(int(fixed.to_integers(g).sum())) < 1 << 62
    assert fixed.to_doubles(fixed.to_integers(g))[0] == pytest.approx(-3.7, abs=1e-12)


def test_a_forest_is_its_state() -> None:
    forest, other = Forest(), Forest()
    forest.columns, forest.base = [Column("x", (0.5,)), Column("w", categories=(1, 3))], [0.25]
    forest.trees = [
        Tree(
            {(0, 0): TreeSplit(1, (True, False), False)},
            {(0, 0): "p0"},
            {(0, 0): 2.5},
            {(1, 0): 0.1},
        )
    ]
    other.load_state_dict(forest.state_dict())
    assert other.trees == forest.trees
    assert other.columns == forest.columns
    assert other.importance() == {"w": 2.5}
    with raises(VflError, Code.CHECKPOINT_INVALID):
        other.load_state_dict({"_extra_state": torch.zeros(3, dtype=torch.uint8)})


@pytest.mark.parametrize("phase", [{}, None])
def test_advice_about_many_categories_is_what_the_method_can_do(phase: Any) -> None:
    made = (
        recipe()
        if phase is not None
        else Recipe.model_validate(cases.recipe(2, task={"kind": "binary"}))
    )
    words = tuple(f"w{number}" for number in range(10_000))
    cells = Categories(np.arange(10_000, dtype=np.int32)[:, None], words=(words,))
    ids = [f"i{number:05}" for number in range(10_000)]
    table = Table("a.csv", ids, categorical=cells, categorical_names=("word",))
    with raises(InputError, Code.DATA_INVALID, names=("word", "a.csv")) as caught:
        prepare(
            made,
            "p1",
            table,
            DataSettings(source="a.csv"),
            made.model.encoder,
            tabular=Course(made).lone_phase is None,
        )
    assert ("tabular" in str(caught.value)) == (phase is None)
