"""Runs of parties that find their common rows: the numbers are those of a run with tables that were
cut by hand.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import vfl
from tests.harness.errors import assert_names, raises
from vfl_common.errors import Code, InputError
from vfl_party.align.quota import count
from vfl_party.rr22 import relay

ROWS, FROM = 160, 40
NUMBERS = np.random.default_rng(5)
IDS = np.array([f"c{number:03d}" for number in range(ROWS)])
AGE, SIZE = NUMBERS.normal(size=ROWS), NUMBERS.normal(size=ROWS)
BANK = pd.DataFrame({"id": IDS, "age": AGE, "left": (AGE + SIZE > 0).astype(int)})[: ROWS - FROM]
SHOP = pd.DataFrame({"id": IDS, "size": SIZE})[FROM:].sample(frac=1.0, random_state=1)
COMMON = set(BANK["id"]) & set(SHOP["id"])
RECIPE = vfl.Recipe.from_dict(
    {
        "name": "found",
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "rows": {"align": "psi"},
        "model": {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [6]}},
        "phases": [{"kind": "splitnn", "epochs": 2, "batch_size": 16}, {"kind": "evaluate"}],
    }
)
RR22 = RECIPE.replace(rows={"align": "psi", "psi": {"engine": "rr22"}})
needs_engine = pytest.mark.skipif(
    bool(relay.explain_absence()), reason=f"needs the wheel spu: {relay.INSTALL}"
)


def run(
    recipe: vfl.Recipe, bank: pd.DataFrame = BANK, shop: pd.DataFrame = SHOP, **more: Any
) -> vfl.Run:
    return vfl.simulate(
        recipe, {"bank": vfl.Data(bank, label="left"), "shop": shop}, quiet=True, **more
    )


def cut(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["id"].isin(COMMON)]


@pytest.fixture(scope="module")
def found() -> vfl.Run:
    return run(RECIPE)


@pytest.fixture(scope="module")
def by_hand() -> vfl.Run:
    return run(RECIPE.replace(rows={"align": "digest"}), cut(BANK), cut(SHOP))


def parameters(of: vfl.Run) -> dict[str, torch.Tensor]:
    bank, shop = of.model("bank"), of.model("shop")
    modules = {"bank encoder": bank.encoder, "bank top": bank.top, "shop encoder": shop.encoder}
    return {
        f"{of} {name}": value
        for of, module in modules.items()
        if module is not None
        for name, value in module.state_dict().items()
    }


def assert_equal_numbers(aligned: vfl.Run, by_hand: vfl.Run) -> None:
    assert aligned.metrics == by_hand.metrics
    ours, theirs = parameters(aligned), parameters(by_hand)
    assert ours.keys() == theirs.keys()
    assert {key.rpartition(" ")[0] for key in ours} == {"bank encoder", "bank top", "shop encoder"}
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_the_numbers_are_those_of_tables_that_were_cut_by_hand(
    found: vfl.Run, by_hand: vfl.Run
) -> None:
    assert_equal_numbers(found, by_hand)


@needs_engine
@pytest.mark.parametrize("processes", [False, True])
def test_rr22_gives_the_numbers_of_tables_that_were_cut_by_hand(
    processes: bool, by_hand: vfl.Run
) -> None:
    aligned = run(RR22, processes=processes)
    assert_equal_numbers(aligned, by_hand)
    assert aligned.bytes.by_phase["align"] == vfl.forecast(RR22, rows=120).by_phase["align"]


def test_the_summary_says_how_many_rows_are_in_common(found: vfl.Run, by_hand: vfl.Run) -> None:
    parties = json.loads((Path(found.folder) / "summary.json").read_text())["parties"]
    counts = {each["name"]: (each["rows"], each["common_rows"]) for each in parties}
    assert counts == {"server": (0, 0), "bank": (120, 80), "shop": (120, 80)}
    assert "80 common rows (bank 67 % of 120, shop 67 % of 120)" in found._repr_html_()
    assert "common rows (" not in by_hand._repr_html_()


def test_each_party_is_told_the_share_of_its_own_rows(caplog: pytest.LogCaptureFixture) -> None:
    shop = vfl.Data(SHOP, settings={"expect_common": 0.7})
    with caplog.at_level(logging.INFO, "vfl_party"):
        run(RECIPE, BANK[FROM - 10 :], shop)
    said = [record.getMessage() for record in caplog.records]
    assert "80 of your 90 rows (89 %) are common to all parties" in said
    assert "80 of your 120 rows (67 %) are common to all parties" in said
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert_names(
        "\n".join(text for text in warned if "common" in text), "data.expect_common", "shop"
    )


@pytest.mark.parametrize("processes", [False, True])
def test_who_runs_all_parties_is_told_what_each_says_of_its_rows(
    processes: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    nobody = SHOP.assign(id=["", *SHOP["id"][1:]])
    vfl.simulate(
        RECIPE,
        {"bank": vfl.Data(BANK[FROM - 10 :], label="left"), "shop": nobody},
        processes=processes,
    )
    said = capfd.readouterr().err.splitlines()
    assert any(
        line.startswith("shop: ") and line.endswith("1 of 120 rows are left out: 1 without an id")
        for line in said
    )
    assert any(
        line.startswith("bank: ") and line.endswith("are common to all parties") for line in said
    )


def test_few_common_rows_are_a_warning_without_a_key(caplog: pytest.LogCaptureFixture) -> None:
    many = pd.DataFrame({"id": [f"x{number}" for number in range(80)], "size": 0.5})
    with caplog.at_level(logging.WARNING, "vfl_party"):
        run(RECIPE, BANK, pd.concat([SHOP, many]))
    assert_names(
        "\n".join(record.getMessage() for record in caplog.records), "data.expect_common", "shop"
    )


def test_a_prediction_is_for_the_rows_in_common(found: vfl.Run, by_hand: vfl.Run) -> None:
    new = {"bank": BANK.drop(columns="left")[20:60], "shop": SHOP}
    scores = found.predict(new)
    assert scores["id"] == list(new["bank"]["id"])
    scored = pd.DataFrame(scores)[[state == "scored" for state in scores["state"]]].reset_index(
        drop=True
    )
    assert sorted(scored["id"]) == sorted(set(new["bank"]["id"]) & set(SHOP["id"]))
    theirs = by_hand.predict(
        {name: each[each["id"].isin(set(scored["id"]))] for name, each in new.items()}
    )
    pd.testing.assert_frame_equal(scored.astype({"class": int}), pd.DataFrame(theirs))


@pytest.mark.parametrize("baseline", ["combined", "alone"])
def test_baselines_have_the_rows_in_common(baseline: str, by_hand: vfl.Run) -> None:
    ours = run(RECIPE, baseline=baseline)
    theirs = run(RECIPE.replace(rows={"align": "digest"}), cut(BANK), cut(SHOP), baseline=baseline)
    assert ours.metrics == theirs.metrics
    assert len(ours.predictions["id"]) == len(by_hand.predictions["id"])
    name = "combined" if baseline == "combined" else "bank"
    assert f"80 common rows ({name} 67 % of 120)" in ours._repr_html_()
    assert "common rows (" not in theirs._repr_html_()


def test_a_forecast_is_what_the_alignment_sends() -> None:
    same = run(RECIPE, BANK, SHOP.assign(id=list(BANK["id"])))
    forecast = vfl.forecast(RECIPE, rows=len(BANK))
    for phase in ("align", "open"):
        assert forecast.by_phase[phase] == same.bytes.by_phase[phase]


# -- how often


def test_a_table_is_aligned_so_often_a_day_and_not_more(tmp_path: Path) -> None:
    path, hour_s = tmp_path / "alignments-bank.json", 3600.0
    for number in range(3):
        count(path, "bank.csv", 3, number * hour_s)
    with raises(InputError, Code.REFUSED, names=("bank.csv", "rows.alignment")):
        count(path, "bank.csv", 3, 3 * hour_s)
    # Of another table.
    count(path, "new.csv", 3, 3 * hour_s)
    # The first one is a day ago.
    count(path, "bank.csv", 3, 24 * hour_s)
    with pytest.raises(InputError):
        count(path, "bank.csv", 3, 24.5 * hour_s)


def test_a_clock_that_was_ahead_does_not_lock_a_table_for_long(tmp_path: Path) -> None:
    path, day_s = tmp_path / "alignments-bank.json", 86_400.0
    count(path, "bank.csv", 1, 30 * day_s)
    with raises(InputError, Code.REFUSED, names=("bank.csv", "rows.alignment")):
        count(path, "bank.csv", 1, 0.0)


def test_processes_that_begin_at_once_are_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "alignments-bank.json"

    def begin(number: int) -> bool:
        try:
            count(path, "bank.csv", 5, float(number))
        except InputError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(begin, range(40))) == 5


def test_a_count_that_cannot_be_read_is_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "alignments-bank.json"
    for text in ("{", "[1]", '{"bank.csv": ["x"]}', '{"bank.csv": 1}', '{"bank.csv": [NaN]}'):
        path.write_text(text)
        with raises(InputError, Code.FILE_INVALID, names="bank.json"):
            count(path, "bank.csv", 3, 0.0)
