"""A model that is trained for sets of parties: exact against one process, whatever else a recipe
asks for, and measured without each party.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

from tests.harness import cases, reference, reference_defences, reference_fedonce, reference_pipe
from tests.harness.errors import raises
from tests.harness.federation import Federation
from tests.harness.memory import in_memory, in_process, run_here
from tests.integration import test_fedhssl, test_fedonce
from tests.integration.test_exact import ROUNDING, TOLERANCE, federated, largest_deviation
from tests.integration.test_resume import held, kill
from vfl.library.run import Run
from vfl.simulation.federation import Origin
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.forecast.count import forecast, outlook_of

SUBSETS: dict[str, Any] = {"subsets": True}
DROPOUT: dict[str, Any] = {"party_dropout": 0.4}
SGD = {"kind": "sgd", "lr": 0.01, "momentum": 0.9}
MLP = {"kind": "mlp", "hidden": [16], "activation": "tanh"}
DATA = cases.columns("sklearn:digits", 3, limit=100)
BINARY = cases.columns("sklearn:breast_cancer", 3, limit=120)


# One case of subsets, and one of party dropout.
BETWEEN_PROGRAMS = {(4, "attention"), (4, "concat")}


def recipe(how: dict[str, Any], rule: str = "", parties: int = 3, **phase: Any) -> dict[str, Any]:
    rule = rule or ("mean" if "subsets" in how else "concat")
    model = {"combine": rule, "encoder": MLP, "top": {"hidden": [16], "dropout": 0.1}}
    return cases.recipe(parties, model=model, phase={"optimizer": SGD} | how | phase)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("how", "rule"),
    [
        (SUBSETS, "mean"),
        (SUBSETS, "max"),
        (SUBSETS, "attention"),
        (DROPOUT, "concat"),
        (DROPOUT, "sum"),
        (DROPOUT, "mean"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parties", [2, 4])
def test_one_process_from_the_paper(
    how: dict[str, Any], rule: str, parties: int, tmp_path: Path
) -> None:
    tables, data = recipe(how, rule, parties), cases.digits(parties)
    want = reference.train(tables, data)
    run = federated if (parties, rule) in BETWEEN_PROGRAMS else in_memory
    assert largest_deviation(run(tmp_path, tables, data), want) <= TOLERANCE
    # What is exact is not the model that a recipe without it gives.
    plain = reference.train(recipe({}, rule, parties), data)
    if "stand_ins.vectors.0" in want["p0"]:
        del want["p0"]["stand_ins.vectors.0"]
    shared = {name: {key: want[name][key] for key in plain[name]} for name in plain}
    assert largest_deviation(shared, plain) > 100 * ROUNDING


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", [SUBSETS, DROPOUT], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"micro_batches": 3},
        {"in_flight": 4, "micro_batches": 2},
        {"local_updates": 3},
        {"cache": {"batches": 3, "uses": 4, "threshold": 0.5}, "in_flight": 2},
    ],
    ids=str,
)
def test_in_flight_in_parts_and_again(
    how: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(how, validate_every=2, epochs=4, checkpoint_steps=7, **more)
    tables["model"]["top"] = {"hidden": [16]}
    want = reference_pipe.train(tables, DATA)
    assert largest_deviation(in_memory(tmp_path, tables, DATA), want) <= TOLERANCE


MARVELL = {"kind": "marvell", "scale": 2.0}


@pytest.mark.parametrize(
    ("how", "transform", "formula"),
    [(SUBSETS, MARVELL, partial(reference_defences.marvell, scale=2.0))],
    ids=["marvell of subsets"],
)
def test_with_defences(
    how: dict[str, Any],
    transform: dict[str, Any],
    formula: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are given one key of noise, which a run draws from the operating system otherwise."""
    monkeypatch.setattr(
        "vfl_party.outbound.filter.secrets",
        SimpleNamespace(randbits=lambda _bits: reference_defences.KEY),
    )
    place = {"exchange": "embedding", "sent_by": "active"}
    tables = recipe(how, epochs=2, batch_size=40, transforms=[place | transform])
    tables["model"]["top"], tables["task"] = {"hidden": [6]}, {"kind": "binary"}
    want = reference_defences.train(tables, BINARY, down=formula)
    assert largest_deviation(in_memory(tmp_path, tables, BINARY), want) <= ROUNDING


@pytest.mark.parametrize("how", [SUBSETS, DROPOUT], ids=str)
def test_packed_values_and_bytes(how: dict[str, Any], tmp_path: Path) -> None:
    tables = recipe(how, codec="bfloat16")
    got, want = in_memory(tmp_path, tables, DATA), reference.train(tables, DATA)
    assert largest_deviation(got, want) <= ROUNDING
    ran = in_process(tmp_path / "sets", tables, DATA).bytes
    plain = in_process(tmp_path / "plain", recipe({}, tables["model"]["combine"]), DATA).bytes
    assert ran.by_link != plain.by_link
    tables["phases"][0].pop("codec")
    assert in_process(tmp_path / "whole", tables, DATA).bytes == plain
    said = forecast(
        outlook_of(Recipe.model_validate(tables | {"simulate": {"parties": DATA}}), tmp_path)
    )
    assert {each for each in said.links if each.message_bytes} == {
        each for each in plain.by_link if each.phase != "control"
    }


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", [SUBSETS, DROPOUT], ids=str)
def test_the_head_and_what_it_is_worth_without_a_party(how: dict[str, Any], tmp_path: Path) -> None:
    tables, data = test_fedonce.recipe(4, "binary"), test_fedonce.data(4, "binary")
    tables["model"]["combine"] = "mean" if how is SUBSETS else "concat"
    tables["phases"][1] |= how
    summary, federation = run_here(tmp_path, tables, data)
    got = {name: federation.parameters(name) for name in federation.names}
    assert largest_deviation(got, reference_fedonce.train(tables, data)) <= TOLERANCE
    of = {f"test without p{number}" for number in (1, 2, 3)}
    assert of <= summary["metrics"].keys()
    assert len({summary["metrics"][each]["loss"] for each in (*of, "test")}) == 4


def test_fine_tuning_after_fedhssl(tmp_path: Path) -> None:
    tables = test_fedhssl.recipe(4, "simsiam", MLP, rounds=1)
    tables["model"]["combine"] = "mean"
    fine = recipe(SUBSETS, epochs=1)["phases"]
    tables["phases"] += [*fine, {"kind": "evaluate"}]
    summary = in_process(tmp_path, tables, cases.digits(4))
    assert {"test", "test without p1", "test without p3"} <= summary.metrics.keys()


CACHED: dict[str, Any] = {"epochs": 8, "batch_size": 8, "checkpoint_steps": 6, "in_flight": 4}
CACHED |= {"optimizer": {"kind": "adam", "lr": 0.001}, "cache": {}}


def test_processes_one_of_which_is_killed_give_what_one_process_gives(tmp_path: Path) -> None:
    tables = recipe(SUBSETS, **CACHED)
    want = in_memory(tmp_path / "one", tables, DATA)
    with held(tmp_path / "many", tables, DATA, received=16_000) as (federation, proxy):
        kill(federation, proxy, cases.ACTIVE)
        assert federation.finish()["interruptions"]
        got = {name: federation.parameters(name) for name in federation.names}
    assert largest_deviation(got, want) == 0.0


def test_processes_train_and_predict_without_one_of_them(tmp_path: Path) -> None:
    tables, whole = recipe(DROPOUT), tmp_path / "one" / "run"
    one = in_memory(tmp_path / "one", tables, DATA)
    Origin(tmp_path, {name: DataSettings(**each) for name, each in DATA.items()}).note(whole)
    want = Run.load(whole).predict(without=["p1"])
    with Federation(tmp_path / "many", tables, DATA) as federation:
        federation.start_all()
        federation.finish()
        many = {name: federation.parameters(name) for name in federation.names}
    assert largest_deviation(many, one) == 0.0
    run = f"runs/{federation.run_folder.name}"
    federation.programs.clear()
    federation.server_options = ("--predict", "--without", "p1")
    with federation:
        federation.start_server()
        for name in ("p0", "p2"):
            path = federation.write_party(name).name
            more = ("--run", run, "--without", "p1", "--out", "some.parquet")
            federation.start(name, "vfl-party", "predict", path, *more)
        for name, program in federation.programs.items():
            assert program.wait(60) == 0, f"{name}: {program.stderr}"
    assert pyarrow.parquet.read_table(federation.folder / "some.parquet").to_pydict() == want


@pytest.mark.parametrize(
    ("how", "change"),
    [
        (SUBSETS, DROPOUT),
        (SUBSETS, {"combine": "concat"}),
        (SUBSETS, {"combine": "sum"}),
        (SUBSETS, {"features": False}),
        (SUBSETS, {"late_policy": "zeros", "deadline_s": 1.0}),
        (DROPOUT, {"late_policy": "zeros", "deadline_s": 1.0}),
        (DROPOUT, {"party_dropout": 1.0}),
        (DROPOUT, {"head": {"deadline_s": 1.0}}),
        (SUBSETS, {"head": {"dp": {"epsilon": 1.0, "delta": 1e-5, "max_grad_norm": 1.0}}}),
        (SUBSETS, {"head": {}}),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(
    how: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    tables, data = recipe(how), DATA
    if "combine" in change:
        tables["model"] |= change
    elif "features" in change:
        tables["parties"][0] |= change
        data = cases.columns("sklearn:digits", 2, limit=100, active_features=False)
    elif "head" in change:
        head = {"kind": "head", "epochs": 1} | change["head"]
        tables["phases"] = [*tables["phases"], head | (how if change["head"] else DROPOUT)]
    else:
        tables["phases"][0] |= change
    with raises(InputError, Code.CONFIG_INVALID) as caught:
        in_memory(tmp_path, tables, data)
    assert any(word in str(caught.value) for word in ("subsets", "party_dropout"))


@pytest.mark.parametrize("how", [SUBSETS, DROPOUT], ids=str)
def test_a_party_alone_has_nobody_to_miss(how: dict[str, Any], tmp_path: Path) -> None:
    data = cases.columns("sklearn:digits", 1, limit=100)
    with raises(InputError, Code.CONFIG_INVALID, names="p0"):
        in_memory(tmp_path, recipe(how, parties=1), data)


@pytest.mark.parametrize("how", [SUBSETS, DROPOUT], ids=str)
def test_predictions_name_who_took_part_and_are_the_model_s_own(
    how: dict[str, Any], tmp_path: Path
) -> None:
    """Without p1 the scores are those that evaluation has measured without it."""
    recipe_ = Recipe.model_validate(
        recipe(how) | {"phases": [*recipe(how)["phases"], {"kind": "evaluate"}]}
    )
    run_in_process(
        recipe_, {name: DataSettings(**each) for name, each in DATA.items()}, tmp_path / "run"
    )
    Origin(tmp_path, {name: DataSettings(**each) for name, each in DATA.items()}).note(
        tmp_path / "run"
    )
    run = Run.load(tmp_path / "run")
    whole, some = run.predict(), run.predict(without=["p1"])
    assert ({*whole["parties"]}, {*some["parties"]}) == ({"p0, p1, p2"}, {"p0, p2"})
    kept = run.predictions
    for name, got in (("test", whole), ("test without p1", some)):
        score = dict(zip(got["id"], got["score_3"], strict=True))
        want = [
            (id_, each)
            for id_, split, each in zip(kept["id"], kept["split"], kept["score_3"], strict=True)
            if split == name
        ]
        assert len(want) == 10
        assert [score[id_] for id_, _ in want] == pytest.approx(
            [each for _, each in want], abs=1e-6
        )
    alone = run.predict(without=["p1", "p2"])
    assert {*alone["parties"]} == {"p0"}
    assert alone["score_3"] != some["score_3"]
    for wrong in (["p0"], ["p7"]):
        with raises(InputError, Code.CONFIG_INVALID, names="--without"):
            run.predict(without=wrong)
