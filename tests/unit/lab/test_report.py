"""``vfl report``: tables and charts of a recorded run."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from PIL import Image, ImageColor
from rich.console import Console

from tests.harness import cases, pages
from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from vfl.cli import cli
from vfl.summary import picture as charts
from vfl.summary.picture import BLUE, ORANGE
from vfl.summary.reading import (
    RunRecord,
    describe_initial_weights,
    find,
    read_curves,
    read_importance,
    read_own_curves,
)
from vfl.summary.table import format_size, print_tables, select_sets, sort_phases
from vfl_common.errors import Code, InputError
from vfl_common.summary import (
    ByteCount,
    Bytes,
    LinkBytes,
    PartySummary,
    PartyValue,
    SetQuality,
    Summary,
    TcpBytes,
    Worth,
)
from vfl_lab.report.charts import draw

OWN = {"peer": "bank", "phase": "train", "kind": "embedding", "direction": "sent"}
METRICS = {
    "binary": {"loss": 0.4, "accuracy": 0.85, "f1": 0.8, "auc": 0.9},
    "multiclass": {"loss": 0.1, "accuracy": 0.97, "f1": 0.97, "auc": 0.999},
    "regression": {"loss": 0.5, "rmse": 55.0, "rmse_scaled": 0.7},
}


def link(sender: str, receiver: str, phase: str, payload: int, envelope: int) -> LinkBytes:
    return LinkBytes(
        sender=sender,
        receiver=receiver,
        phase=phase,
        kind="control" if phase == "control" else "embedding",
        payload_bytes=payload,
        message_bytes=payload + envelope,
        messages=10,
    )


def summary_of(parties: int, task: str = "multiclass") -> Summary:
    names = ["bank", *(f"passive-{number}" for number in range(1, parties))]
    links = []
    for name in names[1:]:
        links += [
            link(name, "bank", "train", 5_000_000, 20_000),
            link("bank", name, "train", 4_900_000, 19_000),
        ]
        links += [link(name, "bank", "evaluate", 70_000, 90), link("bank", name, "evaluate", 0, 38)]
    for name in names:
        links += [link(name, "server", "control", 0, 2000), link("server", name, "control", 0, 120)]
    by_phase = {}
    for phase in ("control", "evaluate", "train"):
        own = [each for each in links if each.phase == phase]
        by_phase[phase] = ByteCount(
            payload_bytes=sum(each.payload_bytes for each in own),
            message_bytes=sum(each.message_bytes for each in own),
            messages=sum(each.messages for each in own),
        )
    total = ByteCount(
        payload_bytes=sum(each.payload_bytes for each in links),
        message_bytes=sum(each.message_bytes for each in links),
        messages=sum(each.messages for each in links),
    )
    kernel = [
        TcpBytes(party=names[1], peer="bank", sent_bytes=5_100_000, received_bytes=4_990_000),
        # Looked too early.
        TcpBytes(party="bank", peer=names[1], sent_bytes=4_000_000, received_bytes=3_000_000),
    ]
    roster = [PartySummary(name="server", role="server", pid=100, device="cpu")]
    for number, name in enumerate(names):
        role: Literal["active", "passive"] = "active" if name == "bank" else "passive"
        roster.append(
            PartySummary(
                name=name, role=role, pid=101 + number, device="cpu", steps=600, wall_s=3.9
            )
        )
    return Summary(
        run_id="20260101-120000-digits-1f2e",
        name="digits",
        job="train",
        method="splitnn",
        preset="paper",
        seed=3,
        recipe_digest="0" * 64,
        metrics={"test": METRICS[task], "validation": METRICS[task]},
        bytes=Bytes(total=total, by_phase=by_phase, by_link=links, tcp=kernel, agrees=True),
        parties=roster,
        steps=600,
        wall_s=3.91,
    )


def record(folder: Path, summary: Summary, lines: list[dict[str, Any]]) -> Path:
    """A run's folder as the programs leave it."""
    (folder / "bank").mkdir(parents=True)
    (folder / "summary.json").write_text(summary.model_dump_json(indent=1))
    recipe = {"phases": [{"name": "train"}, {"name": "evaluate"}]}
    (folder / "bank" / "recipe.json").write_text(json.dumps(recipe))
    (folder / "bank" / "metrics.jsonl").write_text(
        "".join(json.dumps(COUNTED | line) + "\n" for line in lines)
    )
    return folder


# What else a line has.
COUNTED = {"steps": 10, "seconds": 1.5, "sent_bytes": 100, "received_bytes": 200}


def line(
    round_: int,
    value: float,
    *,
    generation: int = 1,
    phase: str = "train",
    task: str = "multiclass",
) -> Any:
    metrics = {"train": {"loss": value}, "validation": METRICS[task] | {"loss": value + 0.1}}
    return {
        "generation": generation,
        "phase": phase,
        "round": round_,
        "rounds": 5,
        "metrics": metrics,
    }


def shown(summary: Summary, width: int) -> str:
    file = io.StringIO()
    print_tables(summary, ["train", "evaluate"], Console(width=width, file=file))
    return file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1250, "1.25 kB"),
        (31_200_000, "31.2 MB"),
        (4_000_000_000, "4 GB"),
    ],
)
def test_sizes_have_units(count: int, text: str) -> None:
    assert format_size(count) == text


def test_phases_stand_in_the_order_of_the_recipe() -> None:
    assert sort_phases(summary_of(3), ["train", "evaluate"]) == ["train", "evaluate", "control"]
    assert sort_phases(summary_of(3))[-1] == "control"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_names_metrics_bytes_and_processes(width: int) -> None:
    text = shown(summary_of(3), width)
    rows = {tuple(each.split()[:2]): each.split() for each in text.splitlines() if each.strip()}
    assert rows["test", "0.1"][2:] == ["0.97", "0.97", "0.999"]
    assert rows["bank", "active"] == ["bank", "active", "cpu", "101", "600", "3.9"]
    # Sent by passive-1: training, evaluation, control; all of it; payload; on TCP.
    sent = " ".join(rows["passive-1", "sent"])
    assert sent == "passive-1 sent 5.02 MB 70.1 kB 2 kB 5.09 MB 5.07 MB 5.1 MB"
    # Where one end stopped looking too early, the other end's count stands.
    assert " ".join(rows["bank", "sent"]).endswith("4.99 MB")
    assert "3.9 s" in text
    assert all(len(each.rstrip()) <= width for each in text.splitlines())


def worthy(parties: int, *, lower: bool = False) -> Summary:
    """A summary that says what each party is worth, of all sets of parties."""
    summary = summary_of(parties)
    names = [each.name for each in summary.parties if each.role != "server"]
    sets = [
        SetQuality(parties=list(each), validation=None, test=0.5 + 0.05 * len(each))
        for size in range(parties + 1)
        for each in itertools.combinations(names, size)
    ]
    shapley = {name: PartyValue(value=0.05, error=0.0123) for name in names}
    worth = Worth(
        metric="auc",
        lower_is_better=lower,
        absent="mean",
        split="test",
        subsets=sets,
        shapley=shapley,
    )
    return summary.model_copy(update={"worth": worth})


def test_what_each_party_is_worth_is_shown_and_drawn(tmp_path: Path) -> None:
    text = shown(worthy(3), 120)
    assert re.search(r"passive-1 +\+0\.0500 +0\.0123", text)
    # The best first.
    assert text.index("bank, passive-1, passive-2") < text.index("bank, passive-1 ")
    assert re.search(r"none +0\.5000", text)
    many = present(worthy(5).worth)
    assert [len(each.parties) for each in select_sets(many)] == [5, *[4] * 5, *[1] * 5, 0]
    lower = worthy(2, lower=True)
    assert select_sets(present(lower.worth))[0].parties == []
    drawn = {path.name: path for path in draw(RunRecord(tmp_path, lower, ()))}
    assert drawn["worth.png"].stat().st_size > 5_000
    again = Summary.model_validate_json(lower.model_dump_json())
    assert again == lower


def test_a_preset_is_shown_if_a_phase_depends_on_it() -> None:
    assert "splitnn, preset paper, seed 3 · 600 steps" in shown(summary_of(3), 120)
    assert "splitnn, seed 3 · 600 steps" in shown(
        summary_of(3).model_copy(update={"preset": ""}), 120
    )


def test_a_gpu_is_named_with_the_memory_that_it_took() -> None:
    summary = summary_of(3)
    assert "GPU memory" not in shown(summary, 120)
    update = {
        "device": "cuda:0",
        "device_name": "NVIDIA H100 80GB HBM3",
        "peak_memory_bytes": 1_250_000_000,
    }
    parties = [p.model_copy(update=update) if p.name == "bank" else p for p in summary.parties]
    text = shown(summary.model_copy(update={"parties": parties}), 120)
    rows = {
        line.split()[0]: line.split()
        for line in text.splitlines()
        if "active" in line or "GPU memory" in line
    }
    assert rows["name"][-2:] == ["GPU", "memory"]
    assert " ".join(rows["bank"]) == "bank active cuda:0 NVIDIA H100 80GB HBM3 101 600 3.9 1.25 GB"


def test_what_a_run_went_through_is_said() -> None:
    summary = summary_of(3)
    last = summary.parties[-1]
    parties = [*summary.parties[:-1], last.model_copy(update={"skipped_rounds": 1})]
    update = {"interruptions": 2, "server_restarts": 1, "parties": parties}
    text = " ".join(shown(summary.model_copy(update=update), 200).split())
    assert f" · 2 interruptions · 1 restart of the server · 1 round skipped by {last.name}" in text
    moved = last.model_copy(update={"arithmetic": pages.arithmetic_of("Z80")})
    text = shown(summary.model_copy(update={"parties": [moved]}), 200)
    assert f" · 1 resume of {last.name} with different arithmetic" in " ".join(text.split())
    assert "interruption" not in shown(summary, 200)


def test_a_peer_s_words_are_no_markup_and_move_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summary_of(2)
    evil = {"metrics": {"test": {"loss[/x]\x1b[31m": 0.5}}}
    evil["parties"] = [
        {**each.model_dump(), "device": "[bold]cpu[/y]\x1b[2J"} for each in summary.parties
    ]  # type: ignore[assignment]
    print_tables(Summary.model_validate(summary.model_dump() | evil))
    out = capsys.readouterr().out
    assert "[bold]cpu[/y] [2J" in out
    assert "loss[/x] [31m" in out
    assert "\x1b" not in out


def test_a_disagreement_is_told() -> None:
    summary = summary_of(2)
    odd = summary.bytes.model_copy(
        update={"agrees": False, "disagreements": ["bank -> shop, train, gradient"]}
    )
    odd_run = summary.model_copy(update={"bytes": odd})
    assert "bank -> shop, train, gradient" in shown(odd_run, 200)
    assert "killed or stopped" not in shown(odd_run, 200)
    interrupted = shown(odd_run.model_copy(update={"interruptions": 1}), 200)
    assert_names(" ".join(interrupted.split()), "bank", "shop")


def test_after_a_rollback_the_later_rounds_count(tmp_path: Path) -> None:
    lines = [line(1, 0.9), line(2, 0.8), line(3, 0.7), line(2, 0.5, generation=2)]
    run = find(record(tmp_path / "run", summary_of(3), lines))
    assert {
        number: metrics["train"]["loss"] for number, metrics in read_curves(run)["train"].items()
    } == {1: 0.9, 2: 0.5}


def test_a_line_cut_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", summary_of(3), [line(1, 0.9)])
    with (folder / "bank" / "metrics.jsonl").open("a") as file:
        file.write('{"generation": 1, "phase": "tr')
    assert list(read_curves(find(folder))["train"]) == [1]


def test_a_damaged_recipe_costs_only_the_order_of_the_phases(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", summary_of(3), [line(1, 0.9)])
    (folder / "bank" / "recipe.json").write_text("[" * 100_000)
    run = find(folder)
    assert run.phases == ()
    assert list(read_curves(run)) == ["train"]


def test_a_chart_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", summary_of(3), [])
    (folder / "bytes.png").mkdir()
    with raises(InputError, Code.FILE_INVALID, names="bytes.png"):
        draw(find(folder))


def pixels(image: Image.Image, color: str) -> int:
    """How many pixels have exactly this colour."""
    counts = image.convert("RGB").getcolors(maxcolors=1 << 20) or []
    return sum(count for count, found in counts if found == ImageColor.getrgb(color))


@pytest.mark.parametrize(
    ("parties", "task"), [(2, "regression"), (3, "binary"), (10, "multiclass")]
)
def test_charts_are_drawn_for_every_task_and_federation(
    tmp_path: Path, parties: int, task: str
) -> None:
    lines = [line(number, 1 / number, task=task) for number in range(1, 6)]
    lines.append(
        {"generation": 1, "phase": "evaluate", "round": 1, "metrics": {"test": METRICS[task]}}
    )
    folder = record(tmp_path / "run", summary_of(parties, task), lines)
    result = CliRunner().invoke(cli, ["report", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    # A legend alone has less.
    for name, least in (("learning-curves.png", 500), ("bytes.png", 10_000)):
        assert str(folder / name) in result.output
        with Image.open(folder / name) as image:
            assert image.width > 800
            assert image.height > 400
            # Of training and validation; of payload and envelope.
            for color in (BLUE, ORANGE):
                assert pixels(image, color) > least


def test_a_metric_of_the_last_round_alone_is_no_curve(tmp_path: Path) -> None:
    """As boosted trees leave them."""
    lines = [line(number, 1 / number, task="binary") for number in range(1, 4)]
    for each in lines[:-1]:
        each["metrics"]["validation"] = {"loss": each["metrics"]["validation"]["loss"]}
    figure = charts.draw_run_curves(find(record(tmp_path / "run", summary_of(2, "binary"), lines)))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "train: loss"
    assert [curve.get_label() for curve in axes.lines] == ["train", "validation"]


def test_two_metrics_of_one_split_can_be_told_apart(tmp_path: Path) -> None:
    lines = [line(number, 1 / number, task="binary") for number in range(1, 4)]
    figure = charts.draw_run_curves(find(record(tmp_path / "run", summary_of(2, "binary"), lines)))
    accuracy, auc = figure.axes[1].lines
    assert (accuracy.get_label(), auc.get_label()) == ("validation accuracy", "validation AUC")
    assert accuracy.get_marker() != auc.get_marker()
    assert accuracy.get_linestyle() != auc.get_linestyle()


def test_the_losses_of_passive_parties_are_drawn_where_their_folders_are(tmp_path: Path) -> None:
    """As FedOnce leaves them: the active party is idle while the others learn, and has one round
    after it.
    """
    idle: list[dict[str, Any]] = [
        {"generation": 1, "phase": "train", "round": number, "metrics": {}} for number in (1, 2, 3)
    ]
    folder = record(tmp_path / "run", summary_of(4), idle)
    run = find(folder)
    assert read_own_curves(run) == {}
    assert [path.name for path in draw(run)] == ["bytes.png"]
    for name in ("passive-1", "passive-3"):
        (folder / name).mkdir()
        lines = [each | {"metrics": {"local": {"loss": 1 / each["round"]}}} for each in idle]
        (folder / name / "metrics.jsonl").write_text(
            "".join(json.dumps(COUNTED | each) + "\n" for each in lines)
        )
    found = read_own_curves(run)["train"]
    assert list(found) == ["passive-1", "passive-3"]
    assert found["passive-3"][2] == {"local": {"loss": 0.5}}
    assert [path.name for path in draw(run)] == ["learning-curves.png", "bytes.png"]


def test_the_summary_alone_gives_the_table_and_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(summary_of(3).model_dump_json())
    result = CliRunner().invoke(
        cli, ["report", str(tmp_path / "summary.json")], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "bytes.png" in result.output
    assert "learning-curves.png" not in result.output


@pytest.mark.parametrize(
    "text", [None, "{}", "nonsense", "[" * 100_000], ids=["none", "object", "nonsense", "deep"]
)
def test_no_run_is_one_sentence(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with raises(InputError, Code.FILE_INVALID, names="summary.json"):
        find(tmp_path)


def test_a_party_s_folder_stands_for_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(tmp_path / "run", summary_of(3), [])
    with raises(InputError, Code.FILE_INVALID, names=("summary.json", "bank")):
        # Nothing says that it is a party's.
        find(folder / "bank")
    (folder / "bank" / "run.json").write_text("{}")
    assert find(folder / "bank") == find(folder)
    monkeypatch.chdir(folder / "bank")
    assert find(Path()) == find(folder)


def begun(folder: Path, name: str, **facts: Any) -> Path:
    """A process's folder of a run, as it is before the run ends, with a ledger."""
    (folder / name).mkdir(parents=True)
    (folder / name / "run.json").write_text(
        json.dumps({"run_id": folder.name, "job": "train"} | facts)
    )
    (folder / name / "recipe.json").write_text(json.dumps(cases.recipe(2)))
    entry = OWN | {"payload_bytes": 5_000_000, "message_bytes": 5_020_000, "messages": 10}
    (folder / name / "ledger.json").write_text(json.dumps({"entries": [entry], "tcp": []}))
    return folder


def reported(path: Path) -> str:
    """What is shown, in single spaces; the command succeeds."""
    result = CliRunner().invoke(cli, ["report", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", ["p0", "server"])
def test_a_run_that_goes_on_is_said_to(tmp_path: Path, name: str) -> None:
    folder = begun(tmp_path / "run", name)
    if name == "p0":
        lines = [COUNTED | line(number, 1 / number) for number in (1, 4)]
        (folder / name / "metrics.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in lines)
        )
    for path in (folder, folder / name):
        shown = reported(path)
        assert_names(shown, "bank", "5.02")
        assert "passive" not in shown
        assert (
            "newest round: 4 of phase train: train loss 0.25; validation loss 0.35, accuracy"
            in shown
        ) == (name == "p0")


def logged(folder: Path, name: str, event: str, message: str, **facts: str) -> None:
    line = {"level": "error", "message": message, "event": event} | facts
    (folder / name / "log.jsonl").write_text(
        f"{json.dumps({'message': 'joined', 'event': 'joined'})}\n{json.dumps(line)}\n"
    )


def test_a_run_that_has_failed_is_said_to(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "p0")
    why = "shop did not come within 900 s"
    logged(folder, "p0", "failed", why, code="PARTY_LOST")
    for path in (folder, folder / "p0"):
        shown = reported(path)
        assert_names(shown, why)
        assert "not ended" not in shown
    logged(folder, "p0", "stopped", "stopped: the same command resumes the run")
    assert_names(reported(folder), "the same command")
    # It was started again.
    logged(folder, "p0", "joined", "joined")
    assert_names(reported(folder), "p0")


def test_what_columns_do_in_trees_is_told_of_the_parties_whose_logs_are_here(
    tmp_path: Path,
) -> None:
    folder = begun(tmp_path / "run", "p0")
    begun(tmp_path / "run", "p1")
    logged(folder, "p0", "importance", "phase secureboost: gain of the columns of p0: age 4.5")
    logged(
        folder,
        "p1",
        "importance",
        "phase secureboost: number of splits of the columns of p1: \x1b[2Jpay 3",
    )
    for path, shows in ((folder, {"p0", "p1"}), (folder / "p0", {"p0"}), (folder / "p1", {"p1"})):
        assert {line.partition(" columns of ")[2][:2] for line in read_importance(path)} == shows
    assert "\x1b" not in "".join(read_importance(folder))
    assert "phase secureboost: gain of the columns of p0: age 4.5" in reported(folder / "p0")
    (folder / "p0" / "log.jsonl").write_text('{"event": "importance"')
    assert read_importance(folder / "p0") == []


def test_what_initial_weights_follow_from_is_told_of_the_parties_whose_folders_are_here(
    tmp_path: Path,
) -> None:
    folder = begun(tmp_path / "run", "p0")
    begun(tmp_path / "run", "p1")
    assert describe_initial_weights(folder) == []
    for name, init in (("p0", "secret"), ("p1", "recipe")):
        path = folder / name / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"init": init}))
    known = "known to all parties, from the recipe's seed (p1)"
    assert describe_initial_weights(folder) == [f"initial weights: {known}; secret (p0)"]
    assert describe_initial_weights(folder / "p0") == ["initial weights: secret (p0)"]
    assert "initial weights: secret (p0)" in reported(folder / "p0")


def test_a_run_of_several_processes_has_failed_as_the_first_says(tmp_path: Path) -> None:
    for name in ("p0", "p1"):
        begun(tmp_path / "run", name)
    logged(tmp_path / "run", "p0", "failed", "p1 stopped the run", code="ABORTED")
    logged(tmp_path / "run", "p1", "failed", "p1.csv: no such file", code="FILE_INVALID")
    with raises(InputError, Code.FILE_INVALID, names=("summary.json", "p1.csv")):
        find(tmp_path / "run")
    # Of `vfl simulate`, whose certificates are of this run alone.
    (tmp_path / "run" / "federation").mkdir()
    with raises(InputError, Code.FILE_INVALID, names=("summary.json", "p1.csv")):
        find(tmp_path / "run")


def test_a_passive_party_s_run_may_go_on_too(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "p1")
    shown = reported(folder)
    assert_names(shown, "report.html", "p1")
    (folder / "p1" / "run.json").write_text(json.dumps({"run_id": "run", "finished": True}))
    shown = reported(folder)
    assert "not ended" not in shown
    assert_names(shown, "report.html", "p1")


def test_an_active_party_that_has_lost_its_summary(tmp_path: Path) -> None:
    assert_names(reported(begun(tmp_path / "run", "p0", finished=True)), "summary.json", "p0")


def test_a_run_on_one_machine_that_goes_on(tmp_path: Path) -> None:
    """As of `vfl simulate`: each process has a folder in the run's."""
    for name in ("p0", "p1"):
        begun(tmp_path / "run", name)
    with raises(InputError, Code.FILE_INVALID, names="summary.json"):
        find(tmp_path / "run")
    assert_names(reported(tmp_path / "run" / "p1"), "report.html", "p1")


def test_a_passive_party_s_own_count_where_it_has_no_summary(tmp_path: Path) -> None:
    (tmp_path / "hospital").mkdir()
    entry = OWN | {"payload_bytes": 5_000_000, "message_bytes": 5_020_000, "messages": 10}
    (tmp_path / "hospital" / "ledger.json").write_text(json.dumps({"entries": [entry], "tcp": []}))
    shown = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    *words, page = shown.output.split()
    assert page == str(tmp_path / "hospital" / "report.html")
    assert words[words.index("sent") + 1 :][:5] == ["5", "MB", "5.02", "MB", "10"]
    assert "a passive party has no summary" in shown.output
    (tmp_path / "hospital" / "run.json").write_text("{}")
    assert (
        words
        == CliRunner()
        .invoke(cli, ["report", str(tmp_path / "hospital")])
        .output.replace(str(tmp_path / "hospital"), str(tmp_path))
        .split()[:-1]
    )
    (tmp_path / "hospital" / "ledger.json").write_text("{}")
    refused = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert isinstance(refused.exception, InputError)
    assert_names(str(refused.exception), "ledger.json")
