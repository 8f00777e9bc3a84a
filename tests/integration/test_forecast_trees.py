"""The forecast of trees beside the ledger: to the byte if each tree is full, else never less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import cases
from tests.harness.errors import assert_names, raises
from vfl.forecasting.network import BatchWork, Network
from vfl.forecasting.show import compute_seconds, make_notes
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.recipe import Recipe, divide
from vfl_common.errors import Code, InputError
from vfl_common.summary import Summary
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import CountedForecast, compare_with_ledger
from vfl_party.homomorphic import cipher_bytes, count_sums_per_cipher

ROWS, COLUMNS = 300, 6


def write(folder: Path, constant: int = 0) -> None:
    """Writes numbers and a word, and a target that depends on each number; the first columns may be
    ``constant``.
    """
    draw = np.random.default_rng(7)
    x = draw.normal(size=(ROWS, COLUMNS)).round(1)
    x[:, :constant] = 1.0
    y = x.sum(axis=1) + draw.normal(size=ROWS)
    lines = [",".join(["id", *(f"x{c}" for c in range(COLUMNS)), "word", "y"])]
    lines += [
        ",".join([f"r{n:03d}", *map(str, x[n]), f"w{int(draw.integers(0, 5))}", f"{y[n]:.4f}"])
        for n in range(ROWS)
    ]
    (folder / "all.csv").write_text("\n".join(lines) + "\n")


def recipe(parties: int, *, features: bool, **phase: Any) -> Recipe:
    """Returns a recipe in which the passive parties share the columns; ``features``: the active
    party has some too.
    """
    tables = cases.recipe(parties, task={"kind": "regression"}, active_features=features)
    share = COLUMNS // (parties if features else parties - 1)
    data: dict[str, Any] = {"p0": {"label": "y", "columns": []}}
    for place in range(parties if features else parties - 1):
        name = f"p{place if features else place + 1}"
        columns = [f"x{c}" for c in range(place * share, (place + 1) * share)]
        data.setdefault(name, {})["columns"] = columns + (["word"] if place else [])
    own = {name: {"source": "all.csv", "id": "id", **each} for name, each in data.items()}
    if not features:
        own["p0"].pop("columns")
    settings = {"kind": "secureboost", "trees": 3, "encryption": "none", "bins": 8} | phase
    return Recipe.model_validate(tables | {"phases": [settings], "simulate": {"parties": own}})


def forecast_and_run(
    made: Recipe, folder: Path, ended: dict[str, int] | None = None
) -> tuple[CountedForecast, Summary]:
    said = forecast(outlook_of(made, folder), ended=ended)
    return said, run_in_process(made, divide(made, folder), folder / "run")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"depth": 1},
        {"depth": 2, "row_sample": 0.7, "column_sample": 0.4, "trees": 3},
        {"encryption": "paillier", "key_bits": 1024, "depth": 2, "trees": 1},
        {"early_stopping": 30, "trees": 4},
        {"goss": {"top": 0.3, "rest": 0.4}, "depth": 2},
    ],
)
def test_full_trees_are_forecast_to_the_byte(settings: dict[str, Any], tmp_path: Path) -> None:
    """One passive party owns every split, and no node is too small for one: nothing is left to the
    data.
    """
    write(tmp_path)
    said, summary = forecast_and_run(recipe(2, features=False, **settings), tmp_path)
    links = compare_with_ledger(said, summary.bytes)
    assert {link.phase for link in links} == {"open", "secureboost"}
    for link in links:
        assert link.forecast == link.counted, link
    phase = said.phases[-1]
    assert_names(phase.bound, "allows")
    assert phase.at_most == ("early_stopping" in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"first_tree_own": True},
        {"min_gain": 5.0, "depth": 5},
        {"leaves": 5, "depth": 4, "trees": 5},
    ],
)
def test_a_forecast_of_trees_is_never_less_than_what_crosses(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, constant=1)
    said, summary = forecast_and_run(recipe(3, features=True, **settings), tmp_path)
    for link in compare_with_ledger(said, summary.bytes):
        assert link.forecast >= link.counted, link
    exact = {link for link in said.links if link.sender == "p0" and link.kind == "gradient"}
    assert exact
    assert exact <= set(summary.bytes.by_link)


def test_rounds_that_early_stopping_has_ended_are_forecast_with_their_walk(tmp_path: Path) -> None:
    write(tmp_path)
    settings = {"early_stopping": 2, "trees": 60, "learning_rate": 1.0, "depth": 2}
    made = recipe(2, features=False, **settings)
    rounds: list[int] = []
    data = divide(made, tmp_path)
    summary = run_in_process(
        made,
        data,
        tmp_path / "run",
        observe=lambda party, _phase, done, *_: rounds.append(done) if party else None,
    )
    ended = max(rounds)
    assert 2 < ended < 60
    known, most = (
        forecast(outlook_of(made, tmp_path), ended=each) for each in ({"secureboost": ended}, None)
    )
    for link in compare_with_ledger(known, summary.bytes):
        assert link.forecast == link.counted, link
    assert sum(link.message_bytes for link in most.links) > 2 * sum(
        link.message_bytes for link in known.links
    )
    with raises(InputError, Code.CONFIG_INVALID, names="--rounds"):
        forecast(outlook_of(recipe(2, features=False), tmp_path), ended={"secureboost": 2})


def test_without_columns_the_sums_are_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    made = recipe(3, features=True, encryption="paillier", depth=3, trees=2)
    said = forecast(outlook_of(made, tmp_path), rows=1000)
    width, train = cipher_bytes("paillier", 2048), 800
    (bound,) = (phase.bound for phase in said.phases if phase.kind == "secureboost")
    assert "p1, p2" in bound
    assert f"{-(-4 * width // count_sums_per_cipher('paillier', 2048)):,} bytes" in bound
    assert_names(bound, "p1", "p2")
    sent = [
        link.payload_bytes for link in said.links if link.sender == "p0" and link.kind == "gradient"
    ]
    assert sent == [2 * train * width] * 2
    assert any(bound in sentence for sentence in make_notes(said, Network(1e8, 0.02)))


def test_the_time_of_a_tree_is_that_of_its_exchanges_and_its_work(tmp_path: Path) -> None:
    """A tree of depth 3 makes seven round trips; one second of work a tree is counted once a
    tree.
    """
    write(tmp_path)
    said = forecast(outlook_of(recipe(2, features=False, splits=[]), tmp_path))
    phase = said.phases[-1]
    assert phase.round_trips == 1 + 3 * 7
    idle, busy = (
        compute_seconds(Network(1e15, 0.02, any_work=work), phase)
        for work in (BatchWork(), BatchWork(1.0, 1.0))
    )
    assert idle == pytest.approx(phase.round_trips * 0.04, rel=1e-3)
    assert busy - idle == pytest.approx(3.0)
