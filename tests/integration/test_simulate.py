"""What ``vfl simulate`` decides before and while processes run."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.errors import assert_names, raises
from vfl.commands import DEMO
from vfl.launcher import processes
from vfl.launcher.processes import Process, end_all, find_culprit, wait_all
from vfl.simulation.federation import Federation, Origin, to_toml
from vfl.simulation.live import Lines, Track, describe_event
from vfl_common.config.base import read_toml
from vfl_common.config.party import load_party
from vfl_common.config.recipe import Recipe, divide, load_recipe
from vfl_common.errors import Code, InputError
from vfl_lab.searching.search import is_search, load_search
from vfl_lab.studies.plan import load_study

EXAMPLES = Path(__file__).parents[2] / "examples"


def recipe(simulate: dict[str, Any] | None, *, features: bool = True, passives: int = 1) -> Recipe:
    parties = [{"name": "bank", "role": "active", "features": features}]
    parties += [{"name": f"shop{number}", "role": "passive"} for number in range(passives)]
    tables = {
        "name": "r",
        "task": {"kind": "binary"},
        "parties": parties,
        "model": {"embedding_size": 4},
        "phases": [{"kind": "splitnn", "epochs": 1}],
    }
    return Recipe.model_validate(tables | ({} if simulate is None else {"simulate": simulate}))


def test_the_demo_is_the_example() -> None:
    assert DEMO.read_text() == (EXAMPLES / "digits.toml").read_text()


@pytest.mark.parametrize(
    "path",
    sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name != "plugin"),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_every_example_can_be_read(path: Path) -> None:
    if path.parent.name == "own-files" and path.name != "recipe.toml":
        party = load_party(path)
        place = load_recipe(Path(party.recipe)).party(party.name)
        assert place is not None
        assert party.data is not None
        assert Path(party.data.source).exists()
    elif path.parent.name == "study" and is_search(path):
        assert load_search(path, path.parent).spaces
    elif path.parent.name == "study":
        assert load_study(path)[1]
    else:
        data = divide(load_recipe(path), path.parent)
        assert all(
            each.source.startswith("sklearn:") or Path(each.source).exists()
            for each in data.values()
        )


def test_the_example_files_are_what_their_program_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = EXAMPLES / "own-files" / "make_data.py"
    scope: dict[str, Any] = {"__file__": str(program), "__name__": "made"}
    exec(compile(program.read_text(), program, "exec"), scope)  # noqa: S102 - our own example
    scope["HERE"] = tmp_path
    scope["main"]()
    for name in ("bank.csv", "hospital.csv"):
        assert (tmp_path / name).read_text() == (program.parent / name).read_text()


def test_parts_go_to_the_parties_with_features_in_roster_order() -> None:
    data = divide(
        recipe({"data": {"source": "sklearn:wine", "label": "target"}}, passives=2), Path("/r")
    )
    assert [(each.view.part, each.view.parts) for each in data.values() if each.view] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


def test_an_active_party_without_features_reads_the_label_alone() -> None:
    shared = {"data": {"source": "all.csv", "id": "id", "label": "y", "numeric": ["a"]}}
    data = divide(recipe(shared, features=False, passives=2), Path("/r"))
    assert (data["bank"].columns, data["bank"].view, data["bank"].numeric) == ((), None, ())
    assert (data["bank"].label, data["bank"].source) == ("y", "/r/all.csv")
    assert [each.view.part for each in data.values() if each.view] == [0, 1]


def test_a_party_may_bring_its_own_data() -> None:
    own = {"data": {"source": "a.csv"}, "parties": {"bank": {"source": "../b.csv"}}}
    data = divide(recipe(own, passives=2), Path("/r/s"))
    assert data["bank"].source == "/r/b.csv"
    assert [each.view.parts for each in data.values() if each.view] == [2, 2]


@pytest.mark.parametrize(
    "simulate",
    [
        None,
        {},
        {"parties": {"bank": {"source": "a"}}},
        {"data": {"source": "a"}, "parties": {"bnak": {"source": "a"}}},
        {"data": {"source": "a"}, "devices": {"moon": "cpu"}},
        {"data": {"source": "a"}, "scheme": "quadrants"},
        {"data": {"source": "a", "view": {"scheme": "columns", "part": 0, "parts": 2}}},
    ],
)
def test_what_does_not_fit_is_one_sentence(simulate: dict[str, Any] | None) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        divide(recipe(simulate), Path("/r"))


def test_toml_survives_writing() -> None:
    tables = {
        "name": 'a "quoted" ü\n',
        "lr": 1e-05,
        "yes": True,
        "a\x7fb": "DEL \x7f",
        "empty": [],
        "model": {"hidden": [1, 2], "encoder": {"kind": "mlp", "a b": 1}},
        "parties": [{"name": "x"}, {"name": "y", "encoder": {"kind": "cnn"}}],
    }
    assert tomllib.loads(to_toml(tables)) == tables


def test_written_files_are_what_the_programs_read(tmp_path: Path) -> None:
    loaded = load_recipe(DEMO, seed=7)
    folder = tmp_path / "run" / "federation"
    federation = Federation(loaded, tmp_path, folder, divide(loaded, EXAMPLES), EXAMPLES)
    federation.write(read_toml(DEMO) | {"seed": 7})
    federation.write_party("bank", "127.0.0.1:4000")
    party = load_party(federation.party_path("bank"))
    assert (party.server, party.out, party.data) == (
        "127.0.0.1:4000",
        str(tmp_path),
        federation.data["bank"],
    )
    assert load_recipe(Path(party.recipe)).digest() == loaded.digest()
    assert Path(party.tls.key).stat().st_mode & 0o777 == 0o600
    assert not (folder / "certs" / "ca.key").exists()


# --- progress


def progress(round_: int, batch: int = 0, batches: int = 0, **facts: Any) -> dict[str, Any]:
    return {
        "event": "progress",
        "phase": "train",
        "round": round_,
        "batch": batch,
        "batches": batches,
    } | facts


def test_only_the_owner_may_read_files_with_the_url_of_a_database(tmp_path: Path) -> None:
    url = "postgresql://bob:secret@host/bank"
    parties = {
        "bank": {"source": url, "query": "SELECT 1", "id": "id", "label": "y"},
        "shop0": {"source": "sklearn:wine"},
    }
    tables = recipe({"parties": parties}).model_dump(mode="json", exclude_defaults=True)
    settings = recipe({"parties": parties})
    data, run = divide(settings, tmp_path), tmp_path / "runs" / "r"
    federation = Federation(settings, tmp_path / "runs", run / "federation", data, tmp_path)
    federation.write(tables)
    federation.write_party("bank", "127.0.0.1:1")
    Origin(tmp_path, data).note(run)
    holding = [path for path in run.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert {path.name for path in holding} == {"bank.toml", "simulated.json"}
    assert {path.stat().st_mode & 0o777 for path in holding} == {0o600}
    # Predictions read the source again.
    assert Origin.of(run).data["bank"].source == url


def test_seconds_left_follow_the_pace_of_the_phase() -> None:
    track = Track()
    track.update(progress(0, 10, 20), now_s=100.0)
    # How many rounds there are is not known yet.
    assert track.estimate_left_s(100.0) is None
    track.update(
        progress(1, rounds=4, metrics={"train loss": 0.5, "validation accuracy": 0.9}), now_s=101.0
    )
    # Half a round took a second.
    assert track.estimate_left_s(101.0) == pytest.approx(6.0)
    assert track.text(101.0) == "round 1/4  train loss 0.5  validation accuracy 0.9  6 s left"
    # What early stopping goes by is shown in its place.
    track.judged["train"] = "ks"
    assert "validation accuracy 0.9" in track.text(101.0)
    found = {"train loss": 0.5, "validation accuracy": 0.9, "validation ks": 0.7}
    track.update(progress(1, rounds=4, metrics=found), now_s=101.0)
    assert "train loss 0.5  validation ks 0.7" in track.text(101.0)
    track.update(progress(1, 5, 20, metrics={}), now_s=101.5)
    assert track.text(101.5).startswith("round 2/4  batch 5/20")


def test_a_rollback_starts_the_pace_anew() -> None:
    track = Track({"train": 10})
    track.update(progress(1), now_s=0.0)
    track.update(progress(5), now_s=4.0)
    track.update(progress(3), now_s=60.0)
    assert track.estimate_left_s(60.0) is None
    track.update(progress(4), now_s=62.0)
    assert track.estimate_left_s(62.0) == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "waiting", "missing": ["a", "b"], "left_s": 9.6},
            "waiting for a, b (at most 10 s more)",
        ),
        (
            {"event": "waiting", "missing": list("abcdefghij"), "left_s": 9.6},
            "for a, b, c, d, e, f, g, h and 2 more (",
        ),
        (
            {"event": "interrupted", "reason": "a was lost", "deadline_s": 60.0},
            "interrupted: a was lost",
        ),
        (
            {"event": "started", "checkpoint": "000002.train.2"},
            "resume from checkpoint 000002.train.2",
        ),
        ({"event": "started", "checkpoint": ""}, "they begin"),
    ],
)
def test_events_in_words(event: dict[str, Any], text: str) -> None:
    assert text in (describe_event(event) or "")


def test_plain_lines_are_few_and_the_last_one_is_there() -> None:
    written: list[str] = []
    lines = Lines(recipe(None), written.append)
    for number in range(1, 101):
        lines.show(progress(number, rounds=100))
    assert len(written) == 2
    assert "round 100/100" in written[-1]


# --- processes


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    """Starts a line of Python in place of one of our programs."""
    popen = subprocess.Popen

    def instead(args: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", args[-1]], **options)

    monkeypatch.setattr(subprocess, "Popen", instead)

    started: list[Process] = []

    def begin(name: str, code: str, program: str = "vfl-party", **options: Any) -> Process:
        started.append(Process(name, [program, code], tmp_path / name, threads=1, **options))
        return started[-1]

    yield begin
    end_all(started)


def ended(process: Process) -> Process:
    assert wait_all([process], 20.0)
    return process


def failing(code: int, describe_event: str) -> str:
    return f"import sys; print('error: {describe_event}', file=sys.stderr); sys.exit({code})"


def test_the_culprit_is_who_failed_first_on_its_own_account(start: Callable[..., Process]) -> None:
    stopped = ended(start("a", failing(4, "b stopped the run")))
    server = ended(start("server", failing(2, "b stopped the run: bad data"), "vfl-server"))
    bad = ended(start("b", failing(2, "x.csv: no such file")))
    late = ended(start("c", failing(3, "b did not come")))
    failure = find_culprit([stopped, server, late, bad]).failure()
    assert failure.exit_code == 2
    assert_names(str(failure), "x.csv")
    assert find_culprit([stopped, late]).failure().exit_code == 3


def test_a_killed_process_is_told_by_its_signal(start: Callable[..., Process]) -> None:
    process = start("a", "import time; time.sleep(60)")
    process.signal(signal.SIGKILL)
    failure = ended(process).failure()
    assert failure.exit_code == 3
    assert_names(str(failure), "killed")


def test_without_a_sentence_the_last_line_stands(start: Callable[..., Process]) -> None:
    failure = ended(start("a", "raise RuntimeError('odd')")).failure()
    assert failure.exit_code == 1
    assert_names(str(failure), "untime")


def test_events_are_read_and_other_words_passed_over(start: Callable[..., Process]) -> None:
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    start("server", "print('hello'); print('{\"event\": \"ready\"}')", events=events)
    assert events.get(timeout=20) == {"event": "ready"}


def test_a_process_that_ignores_sigterm_is_killed(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ORDERLY_S", 0.3)
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = start(
        "a", deaf + '; print(\'{"event": "deaf"}\', flush=True); time.sleep(60)', events=events
    )
    events.get(timeout=20)
    began_s = time.monotonic()
    end_all([process])
    assert process.status == -signal.SIGKILL
    assert time.monotonic() - began_s < 10
