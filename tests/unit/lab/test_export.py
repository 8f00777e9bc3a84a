"""metrics.jsonl in TensorBoard and MLflow: what is read back is what the file says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.harness.errors import assert_names, raises
from tests.unit.common.test_production import trained
from vfl.cli import cli
from vfl.summary.rounds import History, PartyFolder, RoundLine, find_sources
from vfl_common import files
from vfl_common.errors import Code, InputError
from vfl_lab import export

RUN = "20260101-120000-case-1f2e"


def line(
    generation: int, phase: str, round_: int, steps: int, **metrics: dict[str, float]
) -> dict[str, Any]:
    return {
        "time": f"2026-01-01T12:{generation:02d}:{round_:02d}.250Z",
        "generation": generation,
        "phase": phase,
        "round": round_,
        "rounds": 9,
        "steps": steps,
        "seconds": 0.5 * round_,
        "metrics": metrics,
        "sent_bytes": 100 * steps,
        "received_bytes": 90 * steps,
    }


LINES = [
    line(1, "splitnn", 1, 5, train={"loss": 0.75}, validation={"loss": 0.7, "auc": 0.5}),
    line(1, "splitnn", 2, 10, train={"loss": 0.5}, validation={"loss": 0.6, "auc": 0.625}),
    line(1, "evaluate", 1, 10, test={"loss": 0.25, "auc": 0.875}),
]


def write(folder: Path, lines: Sequence[dict[str, Any]], *, finished: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)
    (folder / "run.json").write_text(json.dumps({"run_id": RUN, "finished": finished}))
    (folder / "recipe.json").write_text(
        json.dumps({"name": "case", "seed": 7, "phases": [{"kind": "splitnn"}]})
    )
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two parties; a passive one has no metrics."""
    write(tmp_path / RUN / "bank", LINES)
    write(tmp_path / RUN / "shop", [each | {"metrics": {}} for each in LINES])
    return tmp_path / RUN


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, args)])


def places(rounds: Sequence[RoundLine]) -> list[tuple[int, str, int]]:
    return [(each.generation, each.phase, each.round) for each in rounds]


# -- reading


def test_a_round_that_was_run_again_counts_once(tmp_path: Path) -> None:
    folder = write(tmp_path / RUN / "bank", LINES)
    history = History(PartyFolder(folder))
    history.update()
    assert places(history.rounds) == [(1, "splitnn", 1), (1, "splitnn", 2), (1, "evaluate", 1)]
    write(folder, [line(2, "splitnn", 2, 10, train={"loss": 0.4})])
    history.update()
    assert places(history.rounds) == [(1, "splitnn", 1), (2, "splitnn", 2)]
    write(folder, [line(3, "evaluate", 1, 10), line(4, "splitnn", 1, 5)])
    history.update()
    assert places(history.rounds) == [(4, "splitnn", 1)]


def test_half_a_line_is_waited_for_and_a_cut_one_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path / RUN / "bank", LINES[:1])
    history, path = History(PartyFolder(folder)), folder / "metrics.jsonl"
    whole = json.dumps(LINES[1]) + "\n"
    with path.open("a") as file:
        file.write(whole[:40])
    history.update()
    assert len(history.rounds) == 1
    with path.open("a") as file:
        file.write(whole[40:] + '{"cut": "by a k' + whole + json.dumps(LINES[2]) + "\n")
    history.update()
    assert places(history.rounds) == [(1, "splitnn", 1), (1, "splitnn", 2), (1, "evaluate", 1)]


def test_a_full_file_is_renamed_and_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who read all the time miss nothing; who comes late reads what is kept."""
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1_000)
    path, eager, slow = (
        tmp_path / "metrics.jsonl",
        History(PartyFolder(tmp_path)),
        History(PartyFolder(tmp_path)),
    )
    for number in range(1, 51):
        files.append(path, json.dumps(line(1, "splitnn", number, number)) + "\n")
        eager.update()
        # About two files later.
        if number % 7 == 0:
            slow.update()
    slow.update()
    assert (
        [each.round for each in eager.rounds]
        == [each.round for each in slow.rounds]
        == [*range(1, 51)]
    )
    parts = sorted(tmp_path.iterdir())
    assert parts == sorted(files.part_names(path))
    assert all(part.stat().st_size <= 1_000 for part in parts)
    late = History(PartyFolder(tmp_path))
    late.update()
    kept = [each.round for each in late.rounds]
    assert len(kept) > 15
    assert kept == [*range(51 - len(kept), 51)]
    assert [json.loads(each)["round"] for each in files.read_lines(path)] == kept


def test_a_file_that_is_renamed_this_moment_is_read_under_its_new_name(tmp_path: Path) -> None:
    folder = write(tmp_path / RUN / "bank", LINES)
    (folder / "metrics.jsonl").rename(folder / "metrics.jsonl.1")
    assert [source.party for source in find_sources(tmp_path / RUN)] == ["bank"]
    history = History(PartyFolder(folder))
    history.update()
    assert len(history.rounds) == len(LINES)


def test_a_file_that_cannot_be_renamed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1_000)
    # The last, a folder, cannot be removed.
    for name in files.part_names(tmp_path / "metrics.jsonl")[-2:]:
        name.mkdir()
    path = tmp_path / "metrics.jsonl"
    for number in range(60):
        files.append(path, f"{number:0100}\n")
    # Three full files of nine lines.
    assert len(path.read_text().splitlines()) == 60 - 3 * 9


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\x00garbage",
        b"[" * 100_000,
        b"3",
        b"{}",
        json.dumps(LINES[0] | {"round": 1e999}).encode(),
    ],
    ids=["garbage", "deep", "number", "object", "infinite"],
)
def test_damaged_files_of_a_run_are_passed_over(run: Path, damage: bytes) -> None:
    path = run / "bank" / "metrics.jsonl"
    path.write_bytes(damage + b"\n" + path.read_bytes())
    for name in ("run.json", "recipe.json"):
        (run / "bank" / name).write_bytes(damage)
    history = History(PartyFolder(run / "bank"))
    history.update()
    assert places(history.rounds) == [(1, "splitnn", 1), (1, "splitnn", 2), (1, "evaluate", 1)]
    assert not history.source.finished
    assert isinstance(history.source.read("recipe.json"), dict)


def test_a_party_s_own_folder_will_do(run: Path) -> None:
    assert [(source.run_id, source.party) for source in find_sources(run)] == [
        (RUN, "bank"),
        (RUN, "shop"),
    ]
    assert [(source.run_id, source.party) for source in find_sources(run / "shop")] == [
        (RUN, "shop")
    ]


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_without_rounds_is_told_so(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "empty").mkdir()
    with raises(InputError, Code.FILE_INVALID):
        find_sources(tmp_path / "empty")


def test_following_a_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / RUN / "bank", LINES[:1], finished=False)
    seen: list[int] = []
    closed: list[bool] = []

    class Sink:
        def update(self, rounds: Sequence[RoundLine]) -> None:
            seen.append(len(rounds))

        def close(self, *, finished: bool) -> None:
            closed.append(finished)

    # The run goes on meanwhile.
    monkeypatch.setattr(time, "sleep", lambda _: write(folder, LINES[1:]))
    export.copy(tmp_path / RUN, lambda _: Sink(), follow=True)
    assert (seen, closed) == ([1, 3], [True])


# -- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """{tag: [(step, value, time)]}, with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {
        tag: [(each.step, each.value, each.wall_time) for each in found.Scalars(tag)]
        for tag in tags
    }


def stated(lines: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """The same, from metrics.jsonl."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for each in lines:
        at_s = (
            datetime.strptime(each["time"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
        )
        values = {
            "bytes/sent": each["sent_bytes"],
            "bytes/received": each["received_bytes"],
            "seconds": each["seconds"],
        }
        for split, named in each["metrics"].items():
            values |= {f"{each['phase']}/{split}/{name}": value for name, value in named.items()}
        for tag, value in values.items():
            found.setdefault(tag, []).append((each["steps"], value, at_s))
    return found


def assert_same(
    got: dict[str, list[tuple[int, float, float]]], want: dict[str, list[tuple[int, float, float]]]
) -> None:
    assert got.keys() == want.keys()
    for tag, points in want.items():
        # float32.
        assert got[tag] == [
            (step, pytest.approx(value, rel=1e-6), at_s) for step, value, at_s in points
        ], tag


def test_tensorboard_reads_what_metrics_jsonl_says(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    logs = tmp_path / "logs"
    assert invoke("tensorboard", run, "--out", logs).exit_code == 0
    assert_same(scalars(logs / RUN / "bank"), stated(LINES))
    assert scalars(logs / RUN / "shop").keys() == {"bytes/sent", "bytes/received", "seconds"}

    again = line(2, "splitnn", 2, 10, train={"loss": 0.4})
    write(run / "bank", [again])
    (logs / RUN / "bank" / "events.out.tfevents.1.another").write_bytes(b"")
    result = invoke("tensorboard", run / "bank", "--out", logs)
    assert (result.exit_code, result.output) == (0, f"{logs / RUN / 'bank'}\n")
    assert_same(scalars(logs / RUN / "bank"), stated([LINES[0], again]))
    # Ours is replaced, another's is not.
    assert len(list((logs / RUN / "bank").iterdir())) == 2


def test_while_a_run_goes_back_its_event_file_is_written_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from vfl_lab.export import TensorBoard

    folder = write(tmp_path / RUN / "bank", LINES)
    history = History(PartyFolder(folder))
    sink = TensorBoard(history.source, tmp_path / "logs")
    again = line(2, "splitnn", 2, 10, train={"loss": 0.4})
    for new in ([], [], [again]):
        write(folder, new)
        history.update()
        sink.update(history.rounds)
    sink.close(finished=False)
    assert_same(scalars(tmp_path / "logs" / RUN / "bank"), stated([LINES[0], again]))


# -- MLflow

READ_BACK = """
import json, sys, warnings
from vfl.cli import cli
uri, run, bank, again = sys.argv[1:]
call = ["export", "mlflow", run, "--tracking-uri", uri, "--experiment", "e"]
cli(call, standalone_mode=False)
cli(call, standalone_mode=False)  # adds nothing
with open(bank + "/metrics.jsonl", "a") as file:
    file.write(again)
cli(call, standalone_mode=False)
assert "torch" not in sys.modules
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=uri)
found = {}
for each in client.search_runs([client.get_experiment_by_name("e").experiment_id]):
    history = {name: [(m.step, m.value, m.timestamp) for m in client.get_metric_history(each.info.run_id, name)]
               for name in each.data.metrics}
    found[each.info.run_name] = [each.info.status, each.data.params, history]
print(json.dumps(found))
"""


def with_mlflow(script: str, *args: object) -> Any:
    """Returns the JSON of a script's last line, of a process of its own: importing MLflow takes
    seconds, and it warns.
    """
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("the extra mlflow is not installed")
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        env=os.environ | {"MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_mlflow_reads_what_metrics_jsonl_says(run: Path, tmp_path: Path) -> None:
    again = line(2, "evaluate", 1, 10, test={"loss": 0.125, "auc": 1.0})
    uri = (tmp_path / "mlruns").as_uri()
    found = with_mlflow(READ_BACK, uri, run, run / "bank", json.dumps(again) + "\n")
    assert set(found) == {f"{RUN}/bank", f"{RUN}/shop"}
    status, params, history = found[f"{RUN}/bank"]
    assert status == "FINISHED"
    assert params == {"name": "case", "seed": "7", "phases.0.kind": "splitnn"}
    want = {
        name: [[step, value, round(at_s * 1000)] for step, value, at_s in points]
        for name, points in stated([*LINES, again]).items()
    }
    assert {name: sorted(points) for name, points in history.items()} == {
        name: sorted(points) for name, points in want.items()
    }
    assert set(found[f"{RUN}/shop"][2]) == {"bytes/sent", "bytes/received", "seconds"}


NESTED = """
import json, sys
from vfl.cli import cli
uri, *runs = sys.argv[1:]
for run in [*runs, *runs]:
    cli(["export", "mlflow", run, "--tracking-uri", uri, "--under", "it's a study"], standalone_mode=False)
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=uri)
every = client.search_runs([client.get_experiment_by_name("vfl").experiment_id])
names = {each.info.run_id: each.info.run_name for each in every}
print(json.dumps(sorted([each.info.run_name, each.info.status, names.get(each.data.tags.get("mlflow.parentRunId"))] for each in every)))
"""


def test_runs_of_a_study_are_nested_in_one_run_of_mlflow(tmp_path: Path) -> None:
    runs = [f"2026010{day}-120000-case-1f2e" for day in (1, 2)]
    for run_id in runs:
        trained(tmp_path / "runs", run_id, party="p0")
        lines = "".join(json.dumps(each) + "\n" for each in LINES)
        (tmp_path / "runs" / run_id / "p0" / "metrics.jsonl").write_text(lines)
    folders = [tmp_path / "runs" / run_id for run_id in runs]
    found = with_mlflow(NESTED, (tmp_path / "mlruns").as_uri(), *folders)
    assert [each[::2] for each in found] == [
        *([f"{run_id}/p0", "it's a study"] for run_id in runs),
        ["it's a study", None],
    ]
    assert found[-1][1] == "FINISHED"


REGISTERED = """
import json, sys
from pathlib import Path
from vfl.cli import cli
from vfl_common.registry import ModelRegistry
uri, out, *runs = sys.argv[1:]
from mlflow import MlflowClient, get_tracking_uri
client, registry, found = MlflowClient(tracking_uri=uri), ModelRegistry(Path(out)), []
def export(run):
    call = ["export", "mlflow", f"{out}/{run}", "--tracking-uri", uri, "--register", "it's a case"]
    cli(call, standalone_mode=False)
    versions = {str(each.version): each for each in client.search_model_versions()}
    whose = {name: [each.tags["vfl.run_id"], each.tags["vfl.party"], each.name,
                    client.get_run(each.run_id).info.run_name]
             for name, each in versions.items()}
    aliases = client.get_registered_model("it's a case").aliases
    found.append([whose, {name: str(version) for name, version in aliases.items()}])
first, second = runs
export(first)
registry.promote(first)
export(first)
registry.promote(second)
export(second)
export(first)  # retired; the alias is the other's
registry.rollback()
export(first)
export(second)
registry.retire(first)
export(first)
assert get_tracking_uri() == uri  # MLflow makes no database of its own here
print(json.dumps(found))
"""


def test_a_run_in_production_has_that_alias_in_mlflow(tmp_path: Path) -> None:
    runs = [f"2026010{day}-120000-case-1f2e" for day in (1, 2)]
    for run_id in runs:
        # The active party is not the first by name.
        for party in ("p0", "a1"):
            trained(tmp_path / "runs", run_id, party=party)
            lines = "".join(json.dumps(each) + "\n" for each in LINES)
            (tmp_path / "runs" / run_id / party / "metrics.jsonl").write_text(lines)
    uri = (tmp_path / "mlruns").as_uri()
    found = with_mlflow(REGISTERED, uri, tmp_path / "runs", *runs)
    whose = {
        str(number): [run_id, "p0", "it's a case", f"{run_id}/p0"]
        for number, run_id in enumerate(runs, 1)
    }
    one = {"1": whose["1"]}
    first, second = {"production": "1"}, {"production": "2"}
    assert found == [
        [one, {}],
        [one, first],
        [whose, second],
        [whose, second],
        [whose, first],
        [whose, first],
        [whose, {}],
    ]


@pytest.mark.parametrize(
    ("args", "package", "install"),
    [
        (["tensorboard"], "tensorboard", "`pip install '.[tensorboard]'` in the clone of vfl"),
        (
            ["mlflow", "--tracking-uri", "http://localhost:1"],
            "mlflow",
            "`pip install mlflow-skinny`",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_command(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    package: str,
    install: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    # The same words whichever of its modules another test has imported.
    for name in [each for each in sys.modules if each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    error = invoke(args[0], run, *args[1:]).exception
    assert isinstance(error, InputError)
    assert_names(str(error), "imported")
    assert str(error).endswith(f"Install it with {install}.")
