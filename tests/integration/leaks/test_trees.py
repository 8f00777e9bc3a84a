"""The attacks on trees find what made-up trees give away, as formulas say, and nothing where there
is nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.task import TaskSettings
from vfl_leaks import attacks
from vfl_leaks.attacks import forged_trees as probes
from vfl_leaks.attacks.trees import SETTLED, compute_sides, number_nodes, select_splits, yield_trees
from vfl_leaks.scene import EncoderInputs, Figure, Heard, Scene, UnfitError

ROWS = 3000


def heard(exchange: str, sender: str, values: Any, behind: Any = None) -> Heard:
    receiver = "p0" if sender == "p1" else "p1"
    truth = None if behind is None else torch.tensor(behind)
    return Heard(
        "trees", exchange, 0, sender, receiver, torch.from_numpy(np.asarray(values)), truth
    )


def scene(role: Any, messages: list[Heard], labels: Any, classes: int = 2, **more: Any) -> Scene:
    task = (
        TaskSettings(kind="binary")
        if classes == 2
        else TaskSettings(kind="multiclass", classes=classes)
    )
    attacker = "p1" if role == "passive" else "p0"
    rows = {"train": np.arange(len(labels))}
    y = torch.from_numpy(np.asarray(labels))
    return Scene(
        attacker, role, task, y, rows, 3, lambda: iter(()), heard=lambda: iter(messages), **more
    )


def played(kind: str, where: Scene) -> list[Figure]:
    return list(attacks.load(kind, "test").play(where))


def nodes_of(rows: Any, more: int = 0) -> list[Heard]:
    """Returns a tree of depth 2: the passive party hears the nodes below the root; ``more`` rows
    are for validation.
    """
    below = np.concatenate([np.asarray(rows, np.uint8), np.zeros(more, np.uint8)])
    return [heard("partition", "p0", below), heard("partition", "p0", below[:0])]


@pytest.mark.parametrize("classes", [2, 3])
def test_nodes_that_are_the_labels_give_all_of_them_away(classes: int) -> None:
    labels = np.random.default_rng(1).integers(0, classes, ROWS)
    own = {
        "p1": EncoderInputs(
            ("x",), torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
        )
    }
    figures = played(
        "nodes", scene("passive", nodes_of(labels, more=50) * 3, labels, classes, columns=own)
    )
    assert [figure.value for figure in figures] == [1.0, 1.0, 1.0]
    assert all(figure.chance is not None and figure.chance < 0.56 for figure in figures)
    assert all(figure.baselines["own columns"] < 0.56 for figure in figures[1:])
    assert [figure.knows for figure in figures][1:] == ["nothing, 3 trees", "80 labels, 3 trees"]


def test_a_side_that_agrees_with_nine_labels_in_ten_is_worth_an_auc_of_nine_tenths() -> None:
    """The AUC of a binary score is the mean of the shares of both classes that it gets right."""
    labels = np.arange(ROWS) % 2
    wrong = (np.arange(ROWS) // 2) % 10 == 0
    figures = played("nodes", scene("passive", nodes_of(labels ^ wrong), labels))
    assert [figure.value for figure in figures[:2]] == pytest.approx([0.9, 0.9])


def test_nodes_that_have_nothing_to_do_with_labels_tell_what_shuffled_labels_do() -> None:
    draw = np.random.default_rng(2)
    labels, trees = (
        draw.integers(0, 2, ROWS),
        [nodes_of(draw.integers(0, 4, ROWS)) for _ in range(8)],
    )
    for figure in played(
        "nodes", scene("passive", [each for tree in trees for each in tree], labels)
    ):
        assert abs(figure.value - present(figure.chance)) < 0.04
        assert figure.value < 0.56


def quartiles(x: Any) -> list[Heard]:
    """Returns a tree of depth 2 that cuts x at its middle, then at both quarters; the passive party
    owns all splits.
    """
    below = (x > 0.5).astype(np.uint8)
    halves = [np.flatnonzero(below == node) for node in (0, 1)]
    last = np.concatenate([x[halves[0]] <= 0.25, x[halves[1]] <= 0.75])
    return [
        heard("sums", "p1", np.zeros((1, 16), np.uint8), [0]),
        heard("sums", "p0", np.ones((1, 1), np.uint8)),
        heard("partition", "p1", np.packbits(x <= 0.5)),
        heard("partition", "p0", below),
        heard("sums", "p1", np.zeros((1, 16), np.uint8)),
        heard("sums", "p0", np.ones((2, 1), np.uint8)),
        heard("partition", "p1", np.packbits(last)),
        heard("partition", "p0", below[:0]),
    ]


def test_sides_of_quarters_explain_fifteen_parts_of_sixteen() -> None:
    """Of a uniform column in k equal parts, their means explain 1 - 1/k²; the other column is not
    touched.
    """
    x = np.random.default_rng(3).uniform(size=(ROWS, 2))
    columns = {"p1": EncoderInputs(("cut", "not"), torch.from_numpy(x).float())}
    where = scene("active", quartiles(x[:, 0]), [0, 1] * (ROWS // 2), columns=columns)
    figures = {each.of: each for each in played("sides", where)}
    assert 0.92 < figures["p1: cut"].value < 1 - 1 / 16 + 0.01
    assert abs(figures["p1: not"].value) < 0.05
    assert figures["p1: cut"].chance == pytest.approx(0.0, abs=0.05)


def test_when_sides_say_nothing_of_a_column_the_note_speaks_of_sides() -> None:
    x = np.random.default_rng(3).uniform(size=(ROWS, 2))
    columns = {"p1": EncoderInputs(("not",), torch.from_numpy(x[:, 1:]).float())}
    where = scene("active", quartiles(x[:, 0]), [0, 1] * (ROWS // 2), columns=columns)
    notes = [each.note for each in played("sides", where) if each.note]
    wanted = "p1: from sides of trees the decoder learned nothing, and returns the mean of the known rows"
    assert notes == [wanted]
    assert "embedding" not in notes[0]


def test_sides_are_read_from_bits_and_nodes() -> None:
    x = np.random.default_rng(4).uniform(size=64)
    (tree,) = yield_trees(scene("active", quartiles(x), [0] * 64))
    root, low, high = compute_sides(tree, 64)
    assert (root == np.where(x <= 0.5, 1, -1)).all()
    assert (low == np.where(x > 0.5, 0, np.where(x <= 0.25, 1, -1))).all()
    assert (high == np.where(x <= 0.5, 0, np.where(x <= 0.75, 1, -1))).all()


def test_a_row_that_is_in_a_leaf_stays_where_it_was() -> None:
    first, second = np.array([0, 1, 1], np.uint8), np.array([SETTLED, 2, 3], np.uint8)
    messages = [heard("partition", "p0", values) for values in (first, second, second[:0])]
    (tree,) = yield_trees(scene("passive", messages, [0, 1, 0]))
    assert number_nodes(tree).tolist() == [2, 6, 7]


def sums_of(x: Any, g: Any, h: Any, order: Any, chosen_rows: list[Any]) -> list[Heard]:
    """Returns a tree's sums of prefixes of 16 bins of each column, in a secret order; a block for
    each set of rows.
    """
    cuts = [
        (column, cut)
        for column in range(x.shape[1])
        for cut in np.quantile(x[:, column], np.arange(1, 16) / 16)
    ]
    cuts = [cuts[place] for place in order]
    blocks = [
        [[of[rows][x[rows, column] <= cut].sum() for of in (g, h)] for column, cut in cuts]
        for rows in chosen_rows
    ]
    wire = np.array(blocks).reshape(-1, 2).astype("<i8").view(np.uint8).reshape(-1, 16)
    flags = np.zeros((1, len(cuts)), np.uint8)
    return [
        heard("sums", "p1", wire, [column for column, _ in cuts]),
        heard("sums", "p0", flags),
        heard("partition", "p1", np.empty(0, np.uint8)),
        heard("partition", "p0", np.empty(0, np.uint8)),
    ]


def test_sums_of_one_column_are_told_from_those_of_two() -> None:
    """Without noise in g and h, sums at three nodes tell; with entries that belong to no column,
    nothing is found.
    """
    draw = np.random.default_rng(5)
    x, y = draw.normal(size=(ROWS, 5)), draw.integers(0, 2, ROWS)
    g, h = ((0.5 - y) * 2**40).astype(np.int64), np.full(ROWS, 2**38)
    parts = [np.arange(ROWS), np.arange(ROWS // 3), np.arange(ROWS // 3, ROWS // 2)]
    messages = sums_of(x, g, h, draw.permutation(75), parts)
    (figure,) = played("sums", scene("active", messages, y))
    assert figure.of == "p1: which sums are of one column"
    assert figure.value > 0.7
    assert present(figure.chance) < 0.53
    told_wrong = [
        heard("sums", "p1", messages[0].tensor.numpy(), draw.permutation(75) % 5),
        *messages[1:],
    ]
    (nothing,) = played("sums", scene("active", told_wrong, y))
    assert nothing.value < 0.56


def offered(rows: int, splits: list[int], depth: int) -> list[Heard]:
    """Returns a tree in which p1 offers so many splits of each column; who won is left open."""
    entries = [column for column, count in enumerate(splits) for _ in range(count)]
    found = []
    for level in range(depth):
        nodes = np.zeros(0 if level + 1 == depth else rows, np.uint8)
        found += [
            heard("sums", "p1", np.zeros((1, 16), np.uint8), entries),
            heard("sums", "p0", np.zeros((1, len(entries)), np.uint8)),
            heard("partition", "p1", np.empty(0, np.uint8)),
            heard("partition", "p0", nodes),
        ]
    return found


@pytest.mark.parametrize(("rows", "least", "most"), [(300, 0.9, 1.0), (3000, 0.6, 0.8)])
def test_invented_columns_read_labels_the_better_the_fewer_rows_there_are(
    rows: int, least: float, most: float
) -> None:
    """A split tells log2 of 300 bits: 30 trees tell 1,700 bits at most, and 3,000 labels are more
    than that.
    """
    labels = (np.random.default_rng(6).random(rows) < 0.22).astype(np.int64)
    sides, oracle = played("inventions", scene("passive", offered(rows, [31] * 10, 3) * 30, labels))
    assert sides.knows == "invented splits, 30 trees"
    assert least < sides.value <= most
    assert oracle.value > sides.value
    for figure in (sides, oracle):
        assert present(figure.chance) < 0.6


def test_winners_of_its_choice_tell_all_bins_after_a_few_trees_and_marks_those_of_some_rows() -> (
    None
):
    """Two columns have fourteen thresholds, and a tree of depth 3 has seven nodes. Eight bins
    explain 1 - 1/64.
    """
    x = np.random.default_rng(7).uniform(size=(ROWS, 2))
    columns = {"p1": EncoderInputs(("a", "b"), torch.from_numpy(x).float())}
    values = []
    for trees in (1, 2, 5):
        where = scene(
            "active", offered(ROWS, [7, 7], 3) * trees, [0, 1] * (ROWS // 2), columns=columns
        )
        winners, marks = played("probes", where)
        assert winners.knows == f"winners of its choice, {trees} trees"
        marked = probes.MARKS * 4 * trees / (ROWS - 300)
        assert marks.value == pytest.approx(min(1.0, marked) * (1 - 1 / 64), abs=0.05)
        values.append(winners.value)
    assert 0.4 < values[0] < 0.7 < values[1] <= values[2]
    assert values[2] == pytest.approx(1 - 1 / 64, abs=0.02)


def test_a_search_never_says_what_is_not_so() -> None:
    bins = np.random.default_rng(8).integers(0, 16, (500, 3))
    search = probes.BinSearch(bins)
    for _ in range(3):
        search.grow(4)
        low, high = search.known
        assert ((low <= bins) & (bins <= high)).all()


def test_lies_that_cannot_be_played_are_said() -> None:
    with raises(UnfitError):
        played("inventions", scene("passive", offered(9, [7], 2), [0, 1, 2] * 3, classes=3))
    with raises(UnfitError):
        played("inventions", scene("passive", offered(9, [], 2), [0, 1, 1] * 3))
    with raises(UnfitError):
        played("probes", scene("active", offered(9, [7], 2), [0, 1, 1] * 3))


def test_what_cannot_be_played_is_said() -> None:
    with raises(UnfitError):
        played("nodes", scene("passive", [], [0, 1]))
    with raises(UnfitError):
        played("nodes", scene("passive", [heard("partition", "p0", np.empty(0, np.uint8))], [0, 1]))
    encrypted = [
        heard("sums", "p1", np.zeros((3, 258), np.uint8), [0, 0, 1]),
        heard("sums", "p0", np.zeros((1, 3), np.uint8)),
        heard("partition", "p1", np.empty(0, np.uint8)),
        heard("partition", "p0", np.empty(0, np.uint8)),
    ]
    with raises(UnfitError):
        played("sums", scene("active", encrypted, [0, 1]))
    with raises(UnfitError):
        played("sides", scene("active", encrypted, [0, 1]))


def test_splits_that_hardly_any_known_row_meets_are_left_out() -> None:
    """A decoder that has never seen a side would take the rows on it for anything."""
    rare, often = np.zeros(ROWS), np.where(np.arange(ROWS) % 2, 1.0, -1.0)
    # Of 300 known rows two, on average.
    rare[:20] = 1.0
    assert select_splits([rare, often]).tolist() == often[:, None].tolist()
