"""What a study decides: its plan, what is done, what is left, what it came to."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.harness import cases, pages
from tests.harness.errors import raises
from tests.harness.federation import toml
from vfl.simulation.federation import to_toml
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.program import run_for_status
from vfl_common.summary import ByteCount, Bytes, LinkBytes, Summary
from vfl_lab.studies.chart import draw_study
from vfl_lab.studies.plan import PlannedRun, StudyFile, load_study
from vfl_lab.studies.report import Cost, FineTuned, compute_cost, format_cell, table, write_csv
from vfl_lab.studies.run import (
    Failure,
    StudyFailed,
    StudyRunner,
    estimate_left_s,
    format_event,
    read_finished,
    run_study,
    show_study,
)

SIMULATE = {"scheme": "halves", "data": {"source": "sklearn:digits", "label": "target"}}
SPLITNN = {"kind": "splitnn", "epochs": 1}
TUNE = [SPLITNN, {"kind": "evaluate"}]


def write(folder: Path, base: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A study file with two methods, of which one pretrains, beside its recipe."""
    (folder / "base.toml").write_text(toml(cases.recipe(2) | {"simulate": SIMULATE} | (base or {})))
    study = {
        "name": "s",
        "recipe": "base.toml",
        "seeds": [1, 2],
        "labels": [10, 20],
        "finetune": TUNE,
        "methods": [{"name": "A"}, {"name": "B", "pretrain": [SPLITNN]}],
    }
    kept = {key: value for key, value in (study | changes).items() if value is not None}
    (folder / "study.toml").write_text(toml(kept))
    return folder / "study.toml"


def runs_of(path: Path) -> list[PlannedRun]:
    return [run for chain in load_study(path)[1] for run in chain.runs]


def summary_of(run: PlannedRun, accuracy: float = 0.5, digest: str = "") -> Summary:
    links = [
        LinkBytes(
            sender="a",
            receiver="b",
            phase="p",
            kind=kind,
            payload_bytes=1,
            message_bytes=size,
            messages=1,
        )
        for kind, size in (("embedding", 10), ("embedding", 5), ("weights", 7), ("ack", 1))
    ]
    return Summary(
        run_id=run.run_id,
        name="case",
        job="train",
        method=run.method,
        preset="paper",
        seed=run.seed,
        recipe_digest=digest or run.recipe.digest(),
        metrics={"test": {"accuracy": accuracy}} if run.stage == "finetune" else {},
        bytes=Bytes(
            total=ByteCount(message_bytes=23), by_phase={}, by_link=links, tcp=[], agrees=True
        ),
        parties=[],
        steps=1,
        wall_s=2.0,
    )


def finish(folder: Path, run: PlannedRun, **facts: Any) -> None:
    (folder / run.run_id).mkdir(parents=True)
    (folder / run.run_id / "summary.json").write_text(summary_of(run, **facts).model_dump_json())


# --- the plan


def test_one_pretraining_is_shared_by_all_numbers_of_labels(tmp_path: Path) -> None:
    runs = runs_of(write(tmp_path))
    of_one_seed = ["s.A.s1.n10", "s.A.s1.n20", "s.B.s1", "s.B.s1.n10", "s.B.s1.n20"]
    assert [run.run_id for run in runs] == [
        *of_one_seed,
        *(name.replace(".s1", ".s2") for name in of_one_seed),
    ]
    by_name = {run.run_id: run for run in runs}
    before, after = by_name["s.B.s1"].recipe, by_name["s.B.s1.n20"].recipe
    assert (before.seed, before.start, before.rows.labelled) == (1, None, None)
    assert [phase.kind for phase in before.phases] == ["splitnn"]
    assert after.start is not None
    assert (after.start.run, after.start.phases, after.rows.labelled) == (
        "s.B.s1",
        before.phases,
        20,
    )
    assert [phase.kind for phase in after.phases] == ["splitnn", "evaluate"]
    assert by_name["s.A.s2.n10"].recipe.start is None
    # The recipe's own.
    assert by_name["s.A.s2.n10"].recipe.rows.test == 0.1


def test_without_labels_there_is_one_column_with_the_recipe_s_own(tmp_path: Path) -> None:
    runs = runs_of(write(tmp_path, {"rows": {"labelled": 30}}, labels=None, seeds=[5]))
    assert [(run.run_id, run.labels) for run in runs] == [
        ("s.A.s5", None),
        ("s.B.s5", None),
        ("s.B.s5.finetune", None),
    ]
    assert {run.recipe.rows.labelled for run in runs} == {30}


def test_a_recipe_that_is_written_is_the_one_that_was_planned(tmp_path: Path) -> None:
    from vfl.simulation.federation import to_toml

    for run in runs_of(write(tmp_path)):
        (tmp_path / "again.toml").write_text(to_toml(run.tables))
        assert load_recipe(tmp_path / "again.toml").digest() == run.recipe.digest()


def test_what_a_phase_says_of_its_exchanges_is_in_every_recipe(tmp_path: Path) -> None:
    noise = {"kind": "gaussian", "exchange": "embedding", "sent_by": "passive", "sigma": 0.1}
    phase = SPLITNN | {"codec": "float16", "transforms": [noise]}
    methods = [{"name": "A", "pretrain": [phase]}]
    runs = runs_of(
        write(
            tmp_path,
            labels=None,
            seeds=[1],
            methods=methods,
            finetune=[phase, {"kind": "evaluate"}],
        )
    )
    (asked,) = Recipe.model_validate(cases.recipe(2) | {"phases": [phase]}).phases
    assert [run.recipe.phases[0] for run in runs] == [asked, asked]
    assert runs[1].recipe.start is not None
    assert runs[1].recipe.start.phases == (asked,)
    written = tomllib.loads(
        to_toml({key: value for key, value in runs[1].tables.items() if key != "simulate"})
    )
    # As the parties read it.
    assert Recipe.model_validate(written).phases == runs[1].recipe.phases


def test_a_run_has_the_tables_of_wire_of_its_own_phases(tmp_path: Path) -> None:
    wire = [{"codec": "bits", "bits": 8}, {"codec": "bits", "bits": 4, "phase": "splitnn"}]
    methods = [{"name": "A", "pretrain": [{"kind": "fedhssl", "rounds": 1}]}]
    runs = runs_of(
        write(tmp_path, {"wire": wire}, labels=None, seeds=[1], methods=methods, finetune=[SPLITNN])
    )
    assert [[table.phase for table in run.recipe.wire] for run in runs] == [
        [None],
        [None, "splitnn"],
    ]


def test_overrides_change_one_method_s_recipe(tmp_path: Path) -> None:
    methods = [
        {"name": "A", "overrides": {"model.encoder.hidden": [7], "run.heartbeat_s": 1.0}},
        {"name": "B"},
    ]
    base = {"model": {"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [9]}}}
    runs = {
        run.run_id: run.recipe
        for run in runs_of(write(tmp_path, base, labels=None, methods=methods))
    }
    assert runs["s.A.s1"].model.encoder.hidden == (7,)  # type: ignore[union-attr]
    assert (runs["s.A.s1"].run.heartbeat_s, runs["s.B.s1"].run.heartbeat_s) == (1.0, 0.5)
    assert runs["s.B.s1"].model.encoder.hidden == (9,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"sedes": [1]},
        {"seeds": [1, 1]},
        {"methods": [{"name": "A"}, {"name": "A"}]},
        {"methods": [{"name": "a/b"}]},
        {"finetune": None},
        {"recipe": "gone.toml"},
        {"base": {"simulate": None}},
        {"base": {"start": {"run": "x"}}},
        {"methods": [{"name": "A", "overrides": {"seed": 1}}]},
        {"methods": [{"name": "A", "overrides": {"rows.labelled": 1}}]},
        {"methods": [{"name": "A", "overrides": {"parties.x": 1}}]},
        {"methods": [{"name": "A", "overrides": {"rows": {"labelled": 1}}}]},
        {"methods": [{"name": "A", "overrides": {"simulate": {"threads": 9}}}]},
        {"metric": "acuracy"},
        {"methods": [{"name": "A", "overrides": {"model.wide": 1}}]},
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    base = changes.pop("base", {})
    path = write(tmp_path, **changes)
    recipe = {
        key: value
        for key, value in (cases.recipe(2) | {"simulate": SIMULATE} | base).items()
        if value
    }
    (tmp_path / "base.toml").write_text(toml(recipe))
    with raises(InputError, Code.CONFIG_INVALID, Code.FILE_INVALID):
        load_study(path)


# --- going on


def running(path: Path, folder: Path) -> StudyRunner:
    study, chains = load_study(path)
    return StudyRunner(study, path, folder, chains, lambda _event: None, 1, False)


def test_what_is_done_is_read_from_the_runs_folders(tmp_path: Path) -> None:
    path, folder = write(tmp_path, seeds=[1]), tmp_path / "out"
    first, *_, last = runs_of(path)
    finish(folder, first)
    # Begun.
    (folder / last.run_id / "p0").mkdir(parents=True)
    again = running(path, folder)
    again.begin()
    assert (again.left, [result.finetune.run for result in again.results]) == (4, [first.run_id])


def test_a_changed_recipe_is_refused_by_the_method_s_name(tmp_path: Path) -> None:
    run = runs_of(write(tmp_path))[0]
    finish(tmp_path / "out", run, digest="0" * 64)
    (tmp_path / "out" / run.run_id / "p0").mkdir()
    theirs = json.loads(run.recipe.canonical_json()) | {"seed": 9}
    (tmp_path / "out" / run.run_id / "p0" / "recipe.json").write_text(json.dumps(theirs))
    with raises(InputError, Code.CONFIG_INVALID, names=("--out", "s1.n10")):
        read_finished(tmp_path / "out", run)


def test_a_run_from_before_a_switch_came_is_done_all_the_same(tmp_path: Path) -> None:
    run = runs_of(write(tmp_path))[0]
    finish(tmp_path / "out", run, digest="0" * 64)
    (tmp_path / "out" / run.run_id / "p0").mkdir()
    theirs = json.loads(run.recipe.canonical_json())
    del theirs["model"]["precision"]
    # A key of before.
    theirs["method"] = "A"
    (tmp_path / "out" / run.run_id / "p0" / "recipe.json").write_text(json.dumps(theirs))
    assert read_finished(tmp_path / "out", run) is not None


def test_an_unknown_metric_stops_the_study(tmp_path: Path) -> None:
    path = write(tmp_path, metric="f1", seeds=[1])
    finish(tmp_path / "out", runs_of(path)[0])
    with raises(InputError, Code.CONFIG_INVALID, names=("f1", "10")):
        running(path, tmp_path / "out").begin()


def test_a_finished_study_runs_nothing_and_keeps_pretraining_s_checkpoints(tmp_path: Path) -> None:
    path, folder = write(tmp_path, seeds=[1]), tmp_path / "out" / "s"
    for number, run in enumerate(runs_of(path)):
        finish(folder, run, accuracy=0.5 + number / 10)
        (folder / run.run_id / "p0" / "checkpoints").mkdir(parents=True)
    results = run_study(path, tmp_path / "out")
    assert [result.value("accuracy") for result in results] == [0.5, 0.6, 0.8, 0.9]
    assert [result.pretrain.run for result in results] == ["", "", "s.B.s1", "s.B.s1"]
    assert [found.parts[-3] for found in folder.glob("*/p0/checkpoints")] == ["s.B.s1"]
    assert (folder / "results.png").stat().st_size > 5_000
    lines = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [(line["method"], line["labels"], line["test_accuracy"]) for line in lines][1] == (
        "A",
        "20",
        "0.6",
    )
    assert lines[2]["pretrain_weights_bytes"] == "7"
    assert lines[2]["finetune_embedding_bytes"] == "15"


def test_one_study_at_a_time(tmp_path: Path) -> None:
    from vfl_lab.studies.run import _lock_study

    with _lock_study(tmp_path), raises(InputError, Code.FILE_INVALID), _lock_study(tmp_path):
        pass
    with _lock_study(tmp_path):
        pass


def test_a_failed_study_is_an_error_of_ours_and_the_command_says_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Failure("A, seed 1", "p0: was lost", Code.PARTY_LOST, 3)
    failed = StudyFailed([lost, Failure("A, seed 2", "its pretraining failed")], results())
    assert isinstance(failed, VflError)
    assert (failed.code, failed.exit_code, len(failed.results)) == (Code.PARTY_LOST, 3, 3)

    def fail(*_args: Any, **_more: Any) -> None:
        raise failed

    monkeypatch.setattr("vfl_lab.studies.run.run_study", fail)
    path = write(tmp_path)
    assert run_for_status(lambda: show_study(path, tmp_path, jobs=1, as_json=True)) == 3
    told = capsys.readouterr()
    lines = [
        "2 runs failed. Run the same command to try again:",
        "A, seed 1: p0: was lost",
        "A, seed 2: its pretraining failed",
    ]
    assert told.err == "error: " + "\n  ".join(lines) + "\n"
    assert told.out.count('"event":"result"') == 3


def test_time_left_is_that_of_runs_alike(tmp_path: Path) -> None:
    by_name = {run.run_id: run for run in runs_of(write(tmp_path))}
    rest = [by_name["s.B.s1"], by_name["s.B.s1.n10"], by_name["s.A.s2.n10"]]
    assert estimate_left_s([], rest) is None
    done = [(by_name["s.A.s1.n10"], 2.0), (by_name["s.A.s1.n20"], 4.0)]
    assert estimate_left_s(done, rest) == pytest.approx(3 * 3.0)
    done += [(by_name["s.B.s1"], 10.0), (by_name["s.B.s1.n20"], 1.0)]
    assert estimate_left_s(done, rest[1:], jobs=2) == pytest.approx((1.0 + 3.0) / 2)


# --- results


def results() -> list[FineTuned]:
    cost = Cost("s.B.s1", 3.0, 1_500_000, {"weights": 1_000_000})
    values = {("A", 1): 0.8, ("A", 2): 0.9, ("B", 1): 0.95}
    return [
        FineTuned(
            "s",
            method,
            seed,
            "paper",
            10,
            {"test": {"accuracy": value}},
            cost if method == "B" else Cost(),
            Cost("x", 1.0),
        )
        for (method, seed), value in values.items()
    ]


def test_cells_are_mean_and_sample_deviation() -> None:
    assert format_cell([0.8, 0.9], "accuracy") == "85.0 ± 7.1"
    assert format_cell([0.8], "accuracy") == "80.0"
    assert format_cell([], "accuracy") == "–"
    assert format_cell([51.25, 52.25], "rmse") == "51.75 ± 0.7071"


def test_the_table(tmp_path: Path) -> None:
    study, _ = load_study(write(tmp_path))
    written = io.StringIO()
    Console(width=120, file=written).print(table(study, results()))
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    assert lines[0] == "s: test accuracy in points, mean ± sd of 2 seeds"
    assert lines[1] == "method 10 labels 20 labels pretraining fine-tuning seconds"
    assert lines[3] == "A 85.0 ± 7.1 – – 0 B 1.0"
    assert lines[4] == "B 95.0 – 1.5 MB 0 B 4.0"


def test_bytes_are_told_by_kind(tmp_path: Path) -> None:
    cost = compute_cost(summary_of(runs_of(write(tmp_path))[0]))
    assert (cost.message_bytes, cost.kinds) == (23, {"embedding": 15, "gradient": 0, "weights": 7})


def test_columns_that_only_some_have_are_empty_in_the_others(tmp_path: Path) -> None:
    first, second, _ = results()
    write_csv(
        tmp_path / "r.csv",
        [first, FineTuned("s", "C", 1, "paper", None, {"test": {"auc": 1.0}}, Cost(), Cost())],
    )
    lines = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(line["test_accuracy"], line["test_auc"], line["labels"]) for line in lines] == [
        ("0.8", "", "10"),
        ("", "1.0", ""),
    ]
    assert second.row()["pretrain_run"] == ""


def test_a_run_names_what_it_was_computed_with() -> None:
    summary = pages.summary_of("r", ("bank", "shop"), "binary")
    with_what = "a processor, AVX2, 3 threads, torch 2.14.1, oneDNN 3.12.0, MKL_CBWR=AUTO"
    assert compute_cost(summary).computed_with == with_what


@pytest.mark.parametrize("labels", [None, [10, 20]])
def test_charts_are_drawn(tmp_path: Path, labels: list[int] | None) -> None:
    study = StudyFile.model_validate(load_study(write(tmp_path, labels=labels))[0])
    own = [
        FineTuned(**(vars(result) | {"labels": labels[0] if labels else None}))
        for result in results()
    ]
    assert draw_study(study, own, tmp_path / "r.png").stat().st_size > 5_000


def test_events_in_words() -> None:
    place = {"title": "A, seed 1", "number": 2, "of": 9}
    done = {"event": "done", **place, "seconds": 3.21, "metric": 0.91234, "left_s": 130.0}
    assert format_event(done) == "[2/9] A, seed 1: accuracy 0.9123, 3.2 s; about 2 min left"
    assert format_event(done | {"metric": None, "left_s": 0.0}) == "[2/9] A, seed 1: 3.2 s"
    assert (
        format_event({"event": "failed", **place, "error": "p0: x"})
        == "[2/9] A, seed 1: failed: p0: x"
    )
    assert (
        format_event({"event": "study", "runs": 9, "left": 4, "folder": "r/s"})
        == "9 runs, 5 already finished: r/s"
    )
