"""A solo student: the weights of one process, faults, what crosses, and predictions by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow.csv
import pytest
import torch
from click.testing import CliRunner
from sklearn.datasets import load_breast_cancer
from torch import Tensor

import vfl
from tests.harness import cases, reference, reference_student
from tests.harness.errors import raises
from tests.harness.federation import Federation, refused
from tests.harness.memory import run_here
from tests.harness.waiting import wait_until
from tests.integration.test_exact import ROUNDING, TOLERANCE, federated, largest_deviation
from tests.integration.test_resume import assert_equal, parameters, server_events
from vfl.cli import cli
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import load_summary
from vfl_party.align import AlignedRows
from vfl_party.assembly.party import assemble, open_party
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger
from vfl_party.predict.prediction import Alone
from vfl_party.predict.results import Output
from vfl_party.predict.run import load_joint

SGD = {"kind": "sgd", "lr": 0.1}
TASKS: dict[str, dict[str, Any]] = {
    "binary": {"kind": "binary"},
    "multiclass": {"kind": "multiclass", "classes": 10},
    "regression": {"kind": "regression"},
}


def recipe(task: str, rows: dict[str, Any] | None = None, **student: Any) -> dict[str, Any]:
    tables = cases.recipe(
        2,
        task=TASKS[task],
        rows=rows,
        model={"embedding_size": 3, "top": {"hidden": [5]}, "encoder": {"kind": "mlp"}},
        phase={"epochs": 2, "optimizer": SGD},
    )
    tables["model"]["encoder"]["hidden"] = [6]
    own = {"kind": "student", "epochs": 3, "batch_size": 24, "optimizer": SGD}
    tables["phases"].append(own | student)
    return tables


def data(task: str, limit: int = 100) -> dict[str, dict[str, Any]]:
    if task == "multiclass":
        return cases.digits(2, limit=limit)
    source = {"binary": "sklearn:breast_cancer", "regression": "sklearn:diabetes"}[task]
    return cases.columns(source, 2, limit=limit)


def student_of(weights: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    own = weights[cases.ACTIVE]
    return {key.removeprefix("solo."): own[key] for key in own if key.startswith("solo.")}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("task", list(TASKS))
def test_the_whole_course_has_the_weights_of_one_process(task: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {} if task == "regression" else {"temperature": 2.0}
    tables = recipe(task, weight=0.7, match=0.3, top={"hidden": [4]}, **more)
    # Regression and classes train in this process, two classes between programs.
    if task == "binary":
        found = federated(tmp_path, tables, data(task))
    else:
        found = parameters(run_here(tmp_path, tables, data(task))[1])
    joint = reference.train(tables, data(task))
    want = reference_student.train(tables, data(task), joint)
    assert largest_deviation({"p0": student_of(found)}, {"p0": want}) <= TOLERANCE


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "rows",
    [{"aligned": 0.5}, {"aligned": 0.6, "labelled": 15}],
    ids=["own rows with labels", "few labels"],
)
def test_each_row_counts_with_what_is_known_of_it(rows: dict[str, Any], tmp_path: Path) -> None:
    tables = recipe("binary", rows, embedding_size=4)
    _, federation = run_here(tmp_path, tables, data("binary"))
    found = parameters(federation)
    want = reference_student.train(tables, data("binary"), found)
    assert largest_deviation({"p0": student_of(found)}, {"p0": want}) <= TOLERANCE
    # All rows, or labels, would give another student.
    other = recipe("binary", {"aligned": rows["aligned"], "labelled": 10}, embedding_size=4)
    another = reference_student.train(other, data("binary"), found)
    assert largest_deviation({"p0": student_of(found)}, {"p0": another}) > 100 * ROUNDING


FEDONCE: list[dict[str, Any]] = [
    {"kind": "fedonce", "epochs": 1, "batch_size": 24, "output": "tanh"},
    {"kind": "head", "epochs": 2, "batch_size": 24, "own_encoder": "trained", "optimizer": SGD},
]
FEDCVT: list[dict[str, Any]] = [
    {
        "kind": "fedcvt",
        "epochs": 2,
        "batch_size": 16,
        "unlabelled_batch_size": 12,
        "own_batch_size": 10,
        "optimizer": SGD,
    }
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("joint", [FEDONCE, FEDCVT], ids=["head", "fedcvt"])
def test_any_joint_model_teaches(joint: list[dict[str, Any]], tmp_path: Path) -> None:
    few = {"aligned": 0.6, "labelled": 20}
    tables = recipe("binary", few, embedding_size=4, together=True)
    tables["model"]["embedding_size"] = 4
    tables["phases"] = [*joint, tables["phases"][1], {"kind": "evaluate"}]
    _, federation = run_here(tmp_path / "whole", tables, data("binary"))
    found = parameters(federation)
    want = reference_student.train(tables, data("binary"), found)
    assert largest_deviation({"p0": student_of(found)}, {"p0": want}) <= TOLERANCE
    metrics = load_summary(federation.run_folder / "summary.json").metrics
    assert metrics["test together"] == metrics["test"]


@pytest.mark.usefixtures("float64")
def test_several_labels_are_taught(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x_NF = rng.normal(size=(80, 4)).round(3)
    own = [
        f"r{n:02},{x[0]},{x[1]},{int(x[0] + x[2] > 0)},{int(x[3] > 0)}" for n, x in enumerate(x_NF)
    ]
    other = [f"r{n:02},{x[2]},{x[3]}" for n, x in enumerate(x_NF)]
    (tmp_path / "own.csv").write_text("\n".join(["id,a,b,often,late", *own]))
    (tmp_path / "other.csv").write_text("\n".join(["id,c,d", *other]))
    said: dict[str, Any] = {
        "p0": {"source": str(tmp_path / "own.csv"), "id": ["id"], "labels": ["often", "late"]},
        "p1": {"source": str(tmp_path / "other.csv"), "id": ["id"]},
    }
    tables = recipe("binary", temperature=2.0, alone=True)
    tables["task"] = {"kind": "multilabel", "classes": 2}
    _, federation = run_here(tmp_path, tables, said)
    found = parameters(federation)
    want = reference_student.train(tables, said, found)
    assert largest_deviation({"p0": student_of(found)}, {"p0": want}) <= TOLERANCE
    metrics = load_summary(federation.run_folder / "summary.json").metrics
    assert metrics["test student"] != metrics["test alone"]


def test_rows_that_the_others_lack_count_with_their_labels_under_psi(tmp_path: Path) -> None:
    tables = recipe("binary", {"align": "psi"})
    rng = np.random.default_rng(5)
    x_NF = rng.normal(size=(90, 4)).round(3)
    own = [f"r{n},{x[0]},{x[1]},{int(x.sum() > 0)}\n" for n, x in enumerate(x_NF)]
    other = [f"r{n},{x[2]},{x[3]}\n" for n, x in enumerate(x_NF) if n % 3]
    (tmp_path / "own.csv").write_text("id,a,b,y\n" + "".join(own))
    (tmp_path / "other.csv").write_text("id,c,d\n" + "".join(other))
    said: dict[str, Any] = {
        "p0": {"source": str(tmp_path / "own.csv"), "id": "id", "label": "y"},
        "p1": {"source": str(tmp_path / "other.csv"), "id": "id"},
    }
    _, federation = run_here(tmp_path / "all", tables, said)
    found = student_of(parameters(federation))
    # The same without the labels of those 30 rows: nothing is learnt from them.
    fewer = recipe("binary", {"align": "psi", "labelled": 48})
    _, without = run_here(tmp_path / "fewer", fewer, said)
    assert not torch.equal(
        found["encoder.1.weight"], student_of(parameters(without))["encoder.1.weight"]
    )
    opened = open_party(
        Recipe.model_validate(tables), "p0", DataSettings(**said["p0"]), _mlp(tables)
    )
    common = tuple(row for row in opened.table.ids if int(row[1:]) % 3)
    party = assemble(opened, AlignedRows(common)).party
    assert len(party.rows.get("own")) == 30
    _, targets = party.rows.need_labels()
    lacking = [n for n in range(90) if n % 3 == 0]
    want = [float(x_NF[n].sum() > 0) for n in sorted(lacking, key=lambda n: f"r{n}")]
    assert sorted(party.rows.take(targets, party.rows.get("own")).reshape(-1).tolist()) == sorted(
        want
    )


def test_a_label_keeps_its_noise_when_another_run_aligns_its_row() -> None:
    """A peer chooses which rows are common; each choice must not draw the noise again."""
    tables = recipe("multiclass", {"validation": 0.0, "test": 0.0})
    tables["task"] |= {"label_epsilon": 1.0}
    settings = DataSettings(**data("multiclass")["p0"])
    opened = open_party(Recipe.model_validate(tables), "p0", settings, _mlp(tables))
    ids = list(opened.table.ids)

    def noisy(common: list[str]) -> dict[str, int]:
        targets = assemble(opened, AlignedRows(tuple(common))).party.rows.data.targets
        assert targets is not None
        rest = [one for one in ids if one not in set(common)]
        return dict(zip([*common, *rest], targets.tolist(), strict=True))

    want = noisy(ids)
    assert opened.table.labels is not None
    assert [want[one] for one in ids] != opened.table.labels.tolist()
    for common in (ids[:60], ids[1:70]):
        assert noisy(common) == want


def _mlp(tables: dict[str, Any]) -> Any:
    return Recipe.model_validate(tables).model.encoder


def compared() -> dict[str, Any]:
    """Everything at once: dropout, early stopping, and the comparison with alone and together."""
    stops = {"patience": 2, "metric": "accuracy"}
    tables = recipe("binary", alone=True, together=True, early_stopping=stops, epochs=40)
    tables["model"]["encoder"]["dropout"] = 0.2
    tables["phases"].append({"kind": "evaluate"})
    return tables


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A federation of programs, whose run has ended."""
    with Federation(tmp_path_factory.mktemp("apart"), compared(), data("binary")) as federation:
        federation.start_all()
        federation.finish()
        return federation


def test_programs_do_what_one_process_does_and_send_what_was_forecast(
    apart: Federation, tmp_path: Path
) -> None:
    _, here = run_here(tmp_path, compared(), data("binary"))
    assert_equal(parameters(apart), parameters(here))
    # Early stopping at one party alone: all count the same rounds.
    labels = {apart.checkpoint_labels(name)[-2] for name in apart.names}
    assert labels == {"000043.student.41"}
    lines = (apart.run_folder / "p0" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("phase") == "student" for line in lines) < 30
    tables = {name: DataSettings(**each) for name, each in data("binary").items()}
    summary = load_summary(apart.run_folder / "summary.json")
    said = forecast(outlook_of(_with_data(compared(), tables), Path()))
    links = [each for each in compare_with_ledger(said, summary.bytes) if each.phase == "student"]
    assert links
    for link in links:
        assert link.forecast == link.counted, link
    (up,) = (e for e in apart.ledger("p1") if (e.phase, e.kind) == ("student", "embedding"))
    # Aligned rows, and those of validation and test.
    assert up.payload_bytes == 4 * 3 * 100


def _with_data(tables: dict[str, Any], of: dict[str, DataSettings]) -> Recipe:
    parties = {n: each.model_dump(mode="json", exclude_defaults=True) for n, each in of.items()}
    return Recipe.model_validate(tables | {"simulate": {"parties": parties}})


def test_the_summary_compares_alone_student_and_together(apart: Federation) -> None:
    metrics = load_summary(apart.run_folder / "summary.json").metrics
    for split in ("validation", "test"):
        assert metrics[f"{split} together"] == metrics[split]
        assert metrics[f"{split} alone"] != metrics[f"{split} student"]
    kept = pyarrow.parquet.read_table(apart.run_folder / "p0" / "predictions.parquet")
    assert {"test alone", "test student", "test together"} <= set(kept["split"].to_pylist())


@pytest.mark.usefixtures("float64")
def test_the_model_alone_is_the_same_one_without_a_teacher(tmp_path: Path) -> None:
    tables = recipe("binary", {"labelled": 20}, alone=True)
    tables["phases"].append({"kind": "evaluate"})
    _, federation = run_here(tmp_path / "with", tables, data("binary"))
    found = parameters(federation)
    del tables["phases"][1]["alone"]
    _, without = run_here(tmp_path / "without", tables, data("binary"))
    # It changes nothing of the student.
    assert_equal(parameters(without), found)
    kept = pyarrow.parquet.read_table(federation.run_folder / "p0" / "predictions.parquet")
    scores = kept.filter(pyarrow.compute.field("split") == "test alone")["score_1"].to_pylist()
    want = reference_student.train(tables, data("binary"), found, taught=False)
    assert len(scores) == 10
    x, rows = _own_inputs(tables, "test")
    hidden = (x[rows] @ want["encoder.1.weight"].T + want["encoder.1.bias"]).relu()
    z = hidden @ want["encoder.3.weight"].T + want["encoder.3.bias"]
    logits = z @ want["top.0.weight"].T + want["top.0.bias"]
    assert torch.allclose(logits[:, 0].sigmoid(), torch.tensor(scores), rtol=0, atol=TOLERANCE)


def _own_inputs(tables: dict[str, Any], split: str) -> tuple[Tensor, Any]:
    from vfl_party.base.seeds import split_rows
    from vfl_party.data import Preprocessor, load_table

    said = DataSettings(**data("binary")["p0"])
    table = load_table(said, with_label=True)
    rows = split_rows(tables["seed"], len(table.ids), validation=0.1, test=0.1)
    fitted = Preprocessor.fit(table, rows["local"], one_hot=True, flatten=True, settings=said)
    return fitted.transform(table).x, rows[split]


def test_an_active_party_that_dies_in_training_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    tables = recipe("binary", alone=True, epochs=80, early_stopping={"patience": 80})
    tables["model"]["encoder"]["dropout"] = 0.2
    _, whole = run_here(tmp_path / "whole", tables, data("binary"))
    with Federation(tmp_path / "killed", tables, data("binary")) as federation:
        federation.start_all()
        # Nobody needs the passive party any more.
        federation.programs["server"].wait_for("left")
        wait_until(lambda: federation.checkpoint_labels("p0")[-1] > "000006")
        federation.programs["p0"].kill()
        assert federation.programs["p1"].wait() == 0
        federation.start_party("p0")
        assert federation.programs["p0"].wait() == 0, federation.programs["p0"].stderr
        assert federation.programs["server"].wait() == 0
        begun = server_events(federation, "started")[-1]["checkpoint"]
        assert ".student." in begun, begun
        assert_equal(parameters(federation), parameters(whole))
        sent = [e for e in federation.ledger("p1") if (e.phase, e.kind) == ("student", "embedding")]
        # Nobody embeds the 80 rows twice.
        assert sum(each.payload_bytes for each in sent) == 4 * 3 * 80


def _ended(federation: Federation, party: str, path: str, *arguments: str) -> tuple[int, str]:
    """Predicts at one party, when nobody else is there; its exit code and what it said."""
    federation.programs.clear()
    with federation:
        program = federation.start(party, "vfl-party", "predict", path, *arguments)
        return program.wait(), program.stderr


def test_the_active_party_predicts_by_itself(apart: Federation) -> None:
    folder = apart.run_folder
    path = apart.write_party("p0").name
    arguments = ("--run", f"runs/{folder.name}", "--out", "solo.csv", "--student")
    assert _ended(apart, "p0", path, *arguments)[0] == 0
    found = pyarrow.csv.read_csv(apart.folder / "solo.csv")
    assert set(found["state"].to_pylist()) == {"alone"}
    kept = pyarrow.parquet.read_table(folder / "p0" / "predictions.parquet")
    kept = kept.filter(pyarrow.compute.field("split") == "test student")
    want = dict(zip(kept["id"].to_pylist(), kept["score_1"].to_pylist(), strict=True))
    got = dict(zip(found["id"].to_pylist(), found["score_1"].to_pylist(), strict=True))
    assert len(got) == 100
    assert all(abs(got[int(row)] - score) < ROUNDING for row, score in want.items())
    # The run stands in for the others, too.
    apart.extra = {"p0": {"predict": {"deadline_s": 0.5, "alone": f"runs/{folder.name}"}}}
    path = apart.write_party("p0").name
    away = ("--run", f"runs/{folder.name}", "--out", "away.csv", "--wait", "0.5")
    assert _ended(apart, "p0", path, *away)[0] == 5
    assert (apart.folder / "away.csv").read_text() == (apart.folder / "solo.csv").read_text()
    apart.extra = {}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"phases": ["student"]}, ["a0", "joint model", "splitnn"]),
        ({"weight": 0.0}, ["weight", "match", "teacher"]),
        ({"task": {"kind": "regression"}, "temperature": 2.0}, ["temperature", "regression"]),
        ({"task": {"kind": "ranking"}}, ["student", "ranking"]),
        ({"combine": "attention", "match": 1.0}, ["match", "attention"]),
        ({"features": False}, ["p0", "no features"]),
        ({"early_stopping": {"metric": "rmse"}}, ["early_stopping", "rmse"]),
        ({"threshold": {"rule": "f1"}}, ["threshold", "student"]),
        ({"phases": ["splitnn", "student", "student"]}, ["one student"]),
    ],
    ids=lambda each: ",".join(each) if isinstance(each, dict) else "",
)
def test_what_cannot_be_taught_is_one_sentence(
    change: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    change = dict(change)
    tables, tables_of = recipe("binary"), data("binary")
    tables["task"] = change.pop("task", tables["task"])
    if "threshold" in change:
        tables["task"] = tables["task"] | {"threshold": change.pop("threshold")}
        tables["phases"].append({"kind": "evaluate"})
    if "phases" in change:
        kept = {each["kind"]: each for each in tables["phases"]}
        kinds = change.pop("phases")
        tables["phases"] = [kept[kind] | {"name": f"a{n}"} for n, kind in enumerate(kinds)]
    tables["model"] |= {"combine": change.pop("combine")} if "combine" in change else {}
    if not change.pop("features", True):
        tables["parties"][0]["features"] = False
        tables_of = cases.columns("sklearn:breast_cancer", 1, limit=100, active_features=False)
    if tables["task"]["kind"] == "ranking":
        tables_of["p0"]["group"] = "mean radius"
        tables["rows"]["split"] = "grouped"
    tables["phases"][-1] |= change
    with Federation(tmp_path, tables, tables_of) as federation:
        federation.start_server()
        refused(federation.start_party("p0"), *names)


def test_only_the_active_party_of_a_run_with_a_student_predicts_alone(
    apart: Federation, tmp_path: Path
) -> None:
    path = apart.write_party("p1").name
    code, said = _ended(apart, "p1", path, "--run", f"runs/{apart.run_folder.name}", "--student")
    assert code == 2
    assert "p1 is a passive party" in said
    tables = cases.recipe(2, task=TASKS["binary"], phase={"epochs": 1})
    _, without = run_here(tmp_path, tables, data("binary"))
    # Nobody listens there, and nobody is asked.
    without.address = apart.address
    path = without.write_party("p0").name
    code, said = _ended(without, "p0", path, "--run", "runs/here", "--student")
    assert code == 2
    assert "kind student" in said


def test_on_one_machine_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = recipe("binary")
    tables["simulate"] = {"data": {"source": "sklearn:breast_cancer", "label": "target"}}
    from vfl.library.simulate import run_files

    run_files(tables, tmp_path, tmp_path / "runs" / "one")
    found = CliRunner().invoke(cli, ["predict", "runs/one", "--student", "--out", "solo.csv"])
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["metrics"]["test student"]
    table = pyarrow.csv.read_csv(tmp_path / "solo.csv")
    assert table.num_rows == 569
    assert set(table["state"].to_pylist()) == {"alone"}


def test_it_is_an_onnx_file_on_the_party_s_own_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = recipe("binary")
    tables["simulate"] = {"data": {"source": "sklearn:breast_cancer", "label": "target"}}
    from vfl.library.simulate import run_files

    run_files(tables, tmp_path, tmp_path / "runs" / "one")
    command = ["export", "model", "runs/one", "--party", "p0", "--format", "onnx"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert done.output == "p0.onnx\np0-top.onnx\np0-student.onnx\np0.json\n"
    about = json.loads(Path("p0.json").read_text())["p0-student.onnx"]
    assert (about["what"], about["task"], about["classes"]) == ("student", "binary", [0, 1])
    session = onnxruntime.InferenceSession("p0-student.onnx", providers=["CPUExecutionProvider"])
    whole = load_breast_cancer(as_frame=True).data
    numbers = whole[about["inputs"]["numbers"]["columns"]].to_numpy(np.float32)
    (logits,) = session.run(["output"], {"numbers": numbers})
    want = vfl.Run.load("runs/one").predict(solo=True)["score_1"]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[:, 0])), want, rtol=0, atol=1e-5)


def test_who_stands_in_for_the_others_is_named(tmp_path: Path) -> None:
    tables = recipe("binary")
    tables["model"]["combine"] = "mean"
    tables["phases"][0]["subsets"] = True
    # The folders of all parties lie in that of the run.
    _, federation = run_here(tmp_path, tables, data("binary"))
    run, own = federation.run_folder, DataSettings.model_validate(data("binary")["p0"])
    joint = load_joint(run, "p0")
    # The same labels, from a table of another name, and of other rows.
    labels = joint.state["labels"]
    elsewhere = labels | {"source": "june.csv", "mean": 0.5}
    joint = replace(joint, state=dict(joint.state) | {"labels": elsewhere})
    stand_in = Alone.load(run, joint, "p0", own, None, None)
    stand_in.write([Output(tmp_path / "away.csv")], torch.device("cpu"))
    found = pyarrow.csv.read_csv(tmp_path / "away.csv")
    assert set(zip(found["state"].to_pylist(), found["parties"].to_pylist(), strict=True)) == {
        ("alone", "p0")
    }
    others = replace(joint, state=dict(joint.state) | {"labels": labels | {"classes": [1, 0]}})
    with raises(InputError, Code.CONFIG_INVALID, names=("predict.alone", "p0")):
        Alone.load(run, others, "p0", own, None, None)
