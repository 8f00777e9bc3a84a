"""The leak meter on whole runs: it changes nothing, hears everything, and its command ends as
others do.
"""

from __future__ import annotations

import html
import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.errors import assert_names, error_line, raises
from tests.harness.here import vfl_here
from tests.harness.memory import parameters
from vfl_common.errors import Code, InputError
from vfl_leaks import attacks as kinds
from vfl_leaks.picture import draw
from vfl_leaks.rehearsal import Rehearsal, rehearse
from vfl_leaks.result import REHEARSAL, AttackLine, Rehearsed, Spread
from vfl_leaks.scene import Attack, Figure

BINARY = {"kind": "binary"}


_LINE = "chance, or without\nany message"


def tables(**phase: object) -> dict[str, object]:
    made = cases.recipe(3, task=BINARY, phase={"epochs": 2, "batch_size": 32, **phase})
    data = cases.columns("sklearn:breast_cancer", 3, limit=200)
    made["phases"].append({"kind": "evaluate"})
    return made | {"simulate": {"parties": data}}


def test_a_rehearsal_hears_every_gradient_and_changes_no_parameter(tmp_path: Path) -> None:
    plain = vfl.simulate(tables(codec="float16"), out=tmp_path / "runs", quiet=True)
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")
    recipe = vfl.Recipe.from_dict(tables(codec="float16"))
    run = rehearse(recipe, {}, tmp_path / "runs", rehearsal.attach, quiet=True)
    assert run.metrics == plain.metrics
    for name in recipe.parties:
        one, other = parameters(plain.folder / name), parameters(run.folder / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    heard = sum(
        tensor.numel()
        for key, tensor in rehearsal.recording.rows.messages(receiver="p1")
        if not key.meant
    )
    gradients = [
        each
        for each in run.summary.bytes.by_link
        if each.receiver == "p1" and each.kind == "gradient"
    ]
    # The codec sends two bytes a number.
    assert 2 * heard == sum(each.payload_bytes for each in gradients) > 0
    for batch in rehearsal.scene("p1", 1).gradients():
        assert batch.meant is not None
        assert batch.came.dtype is torch.float32
        # What came is what the codec made of it.
        assert torch.equal(batch.came, batch.meant.half().float())
        assert len(batch.rows) == len(batch.came)


def test_the_same_seeds_give_the_same_figures_and_the_library_has_columns(tmp_path: Path) -> None:
    first = vfl.leaks(tables(), attacks=["norm", "direct"], seeds=[1, 2], quiet=True)
    again = vfl.leaks(tables(), attacks=["norm", "direct"], seeds=[1, 2], quiet=True, out=tmp_path)
    one, other = first.as_json(), again.as_json()
    for each in (*one["recipes"], *other["recipes"]):
        # The clock is no part of a seed.
        assert each.pop("times")
    assert one == other
    columns = first.columns()
    assert columns["attacker"] == ["p1", "p2"]
    assert all(0.5 <= value <= 1 for value in columns["leak"])
    assert len(first.found[0].lines[0].value.values) == 2
    (note,) = [note for note in first.found[0].notes if note.startswith("direct by p1, p2 ")]
    assert_names(note, "p1", "p2")
    # Runs.
    assert len([*tmp_path.iterdir()]) == 2


def test_what_bfloat16_gives_away_is_what_a_trained_model_gives_away() -> None:
    """Gradients of a model that has never learnt tell nearly every label by their length."""
    found = {}
    for precision in ("float32", "bfloat16"):
        given = tables(epochs=30, optimizer={"lr": 0.02})
        given["model"] = {"embedding_size": 8, "precision": precision}
        (lines,) = [each.lines for each in vfl.leaks(given, attacks=["norm"], quiet=True).found]
        found[precision] = [line.value.mean for line in lines]
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.05)


def test_an_exchange_without_the_defence_is_attacked_by_itself_and_named(tmp_path: Path) -> None:
    """Embeddings of training are noise; those of evaluation leave as they are."""
    noise = {
        "kind": "clipped_gaussian",
        "exchange": "embedding",
        "clip": 0.1,
        "epsilon": 0.5,
        "delta": 1e-5,
    }
    half = tables(transforms=[{**noise, "sent_by": "passive"}])
    half["simulate"] = {"parties": cases.columns("sklearn:breast_cancer", 3, limit=569)}
    one = vfl.leaks(half, attacks=["columns"], quiet=True)
    means = [line for line in one.found[0].lines if line.of == "p1: mean of columns"]
    found = {(line.place, line.knows.endswith("all epochs")): line.value.mean for line in means}
    own = {line.place: line.baselines["own columns"].mean for line in means}
    assert found["splitnn/embedding", False] < 0.1
    # Two epochs of much noise say no more than the attacker's own columns.
    assert found["splitnn/embedding", True] < own["splitnn/embedding"] + 0.05
    assert found["evaluate/embedding", False] > 0.4
    assert found["evaluate/embedding", True] > own["evaluate/embedding"] + 0.05
    assert len(found) == 4
    shown = [line.place for line in one.found[0].worst if line.of == "p1: mean of columns"]
    assert shown == ["evaluate/embedding", "evaluate/embedding"]
    (gap,) = one.found[0].gaps
    assert "clipped_gaussian" in gap
    _, _, open_ones = gap.partition("splitnn/embedding")
    assert "splitnn/validation, evaluate/embedding" in open_ones
    assert_names(gap, "clipped_gaussian")
    assert any("splitnn/embedding R² " in text for text in one.found[0].elsewhere)
    (few,) = [note for note in one.found[0].notes if "splitnn/validation of p1 (57 rows)" in note]
    assert_names(few, "p1", "p2")
    page = html.unescape(re.sub(r"<[^>]+>", "", one._repr_html_()))
    assert gap in " ".join(page.split())


def test_a_defence_that_is_weaker_elsewhere_is_named(tmp_path: Path) -> None:
    noise = {"kind": "clipped_gaussian", "clip": 0.1, "delta": 1e-5, "sent_by": "passive"}
    weaker = [
        noise | {"exchange": "embedding", "epsilon": 0.5},
        noise | {"exchange": "validation", "epsilon": 9.0},
    ]
    gaps = vfl.leaks(tables(transforms=weaker), attacks=["norm"], quiet=True).found[0].gaps
    (gap,) = [gap for gap in gaps if "epsilon = 0.5" in gap]
    assert "splitnn/validation" in gap.partition("splitnn/embedding")[2]
    assert_names(gap, "clipped_gaussian", "0.1")


def test_categories_are_the_same_table_whatever_the_encoder(tmp_path: Path) -> None:
    words = ["red", "green", "", "blue"]
    lines = [f"r{n},{n * 7 % 13},{words[n % 4]},{'yes' if n % 3 else 'no'}" for n in range(60)]
    (tmp_path / "shop.csv").write_text("\n".join(["id,orders,colour,due", *lines]))
    parties: dict[str, dict[str, object]] = {
        "p0": {"label": "due", "columns": ["orders"]},
        "p1": {"columns": ["orders", "colour"]},
    }
    source: dict[str, object] = {"source": str(tmp_path / "shop.csv"), "id": "id"}
    found = []
    for number, kind in enumerate(("mlp", "tabular")):
        made = cases.recipe(
            2, task=BINARY | {"positive": "yes"}, phase={"epochs": 1, "batch_size": 16}
        )
        made["model"]["encoder"] = {"kind": kind, "hidden": [4]}
        made["simulate"] = {"parties": {name: source | more for name, more in parties.items()}}
        (tmp_path / f"record{number}").mkdir()
        rehearsal = Rehearsal(tmp_path / f"record{number}")
        rehearse(vfl.Recipe.from_dict(made), {}, tmp_path / "runs", rehearsal.attach, quiet=True)
        columns = rehearsal.scene("p0", 1).columns["p1"]
        assert dict(columns.groups) == {"colour": range(1, 5)}
        assert columns.names == (
            "orders",
            *(f"colour={word}" for word in ("missing", "blue", "green", "red")),
        )
        found.append(columns.table(np.arange(60)))
    assert found[0].shape == (60, 5)
    assert torch.equal(*found)


def test_attacks_that_do_not_know_a_method_refuse_it_in_a_line(tmp_path: Path) -> None:
    trees = tables() | {
        "phases": [{"kind": "secureboost", "trees": 2, "depth": 2, "encryption": "none"}]
    }
    vfl.Recipe.from_dict(trees).save(tmp_path / "trees.toml")
    chosen = "norm,cosine,completion,columns"
    done = vfl_here("leaks", "trees.toml", "--attacks", chosen, "--out", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "found" / "leaks.json").read_text())["recipes"]
    assert (found["lines"], found["sizes"]) == ([], [])
    words = " ".join(done.stdout.split())
    for note in found["notes"]:
        assert note in words
        assert_names(note, "played")
    for name in ("norm, cosine by p1, p2 ", "columns by p0 ", "completion by p1, p2 "):
        assert any(note.startswith(name) for note in found["notes"])
    assert not (tmp_path / "found" / "leaks.png").exists()


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    vfl.Recipe.from_dict(tables()).save(tmp_path / "plain.toml")
    vfl.Recipe.from_dict(tables(iso=5.0) | {"name": "noisy"}).save(tmp_path / "noisy.toml")
    done = vfl_here(
        "leaks",
        "plain.toml",
        "noisy.toml",
        "--attacks",
        "norm,cosine",
        "--out",
        "found",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert REHEARSAL in " ".join(done.stdout.split())
    found = json.loads((tmp_path / "found" / "leaks.json").read_text())
    plain, noisy = (
        {line["knows"]: line["value"]["mean"] for line in each["lines"] if line["attacker"] == "p1"}
        for each in found["recipes"]
    )
    assert plain["1 positive"] > 0.9
    assert noisy["1 positive"] < plain["1 positive"]
    assert (tmp_path / "found" / "leaks.png").read_bytes()[:4] == b"\x89PNG"


def test_recipes_of_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    made = tables()
    for name, more in (("plain", {}), ("noisy", {"iso": 5.0})):
        vfl.Recipe.from_dict(tables(**more)).save(tmp_path / f"{name}.toml")
    done = vfl_here("leaks", "plain.toml", "noisy.toml", "--attacks", "cosine,norm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"plain, seed {vfl.Recipe.from_dict(made).settings.seed}\n" in done.stderr
    assert done.stderr.index("plain, seed") < done.stderr.index("noisy, seed")
    assert " ".join(done.stdout.split()).startswith("plain: labels: ")
    rows = done.stdout[done.stdout.index("Recipes compared") : done.stdout.index("plain: test")]
    assert "lost against plain" in rows
    # The worst first.
    assert rows.index("cosine") < rows.index("norm")
    same = vfl.leaks([made, made], attacks=["norm"], quiet=True)
    assert [each.name for each in same.found] == [f"{made['name']} 1", f"{made['name']} 2"]


def test_the_worst_leaks_are_drawn_first_and_the_rest_is_named() -> None:
    def line(attack: str, leak: float, **more: Any) -> AttackLine:
        return AttackLine(
            attack, "p1", "labels", "nothing", "AUC", Spread((leak,)), chance=Spread((0.5,)), **more
        )

    lines = tuple(line(f"a{number}", 0.5 + number / 30) for number in range(12))
    detail = line("columns", 0.99, detail=True)
    found = Rehearsed("one", (1,), "test auc", Spread((0.7,)), 1000, (*lines, detail))
    other = Rehearsed(
        "other", (1,), "test auc", Spread((0.6,)), 1000, (line("b", 1.0, high=Spread((1.0,))),)
    )
    figure = draw([found, other])
    titles = [
        axes.get_title(loc="left").split(" ")[0] for axes in figure.axes if axes.get_visible()
    ]
    assert titles == ["b", "a11", "a10", "a9", "a8", "a7", "a6", "a5", "a4"]
    assert figure.axes[0].get_ylabel() == "AUC, 95 % of batches"
    assert figure.axes[1].get_ylabel() == "AUC"
    assert "a3 by p1: labels, a2 by p1: labels" in " ".join(figure.get_supxlabel().split())
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        "one, 1 kB",
        "other, 1 kB",
        _LINE,
    }


def test_one_recipe_is_drawn_as_bars_beside_chance() -> None:
    def line(of: str, leak: float, unit: str, **more: Any) -> AttackLine:
        return AttackLine(
            "a", "p1", of, "nothing", unit, Spread((leak,)), chance=Spread((0.5,)), **more
        )

    lines = (
        line("x", 0.6, "AUC"),
        line("y", 0.9, "AUC"),
        line("z", 0.2, "MSE"),
        line("x1", 0.9, "R²", detail=True),
    )
    figure = draw([Rehearsed("one", (1,), "test auc", Spread((0.7,)), 1000, lines)])
    drawn: dict[str, Any] = {axes.get_xlabel(): axes for axes in figure.axes}
    assert set(drawn) == {"AUC", "MSE"}
    assert [bar.get_width() for bar in drawn["AUC"].patches] == [0.9, 0.6]
    assert [text.get_text() for text in drawn["AUC"].get_yticklabels()] == [
        "a by p1: y\nknown: nothing",
        "a by p1: x\nknown: nothing",
    ]
    assert [list(each.get_xdata()) for each in drawn["MSE"].lines] == [[0.5, 0.5]]
    assert "one, test auc 0.700, 1 kB" in figure.get_suptitle()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [_LINE.replace("\n", " ")]


def test_figures_found_before_a_run_that_fails_are_shown(tmp_path: Path) -> None:
    vfl.Recipe.from_dict(tables()).save(tmp_path / "plain.toml")
    wrong = tables(
        transforms=[{"kind": "iso", "exchange": "embeding", "sent_by": "active", "amplifier": 1.0}]
    )
    vfl.Recipe.from_dict(wrong | {"name": "wrong"}).save(tmp_path / "wrong.toml")
    args = ("--attacks", "norm", "--out", "found")
    done = vfl_here("leaks", "plain.toml", "wrong.toml", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert "'embeding'" in error_line(done.stderr)
    (kept,) = json.loads((tmp_path / "found" / "leaks.json").read_text())["recipes"]
    assert kept["lines"]
    assert "norm" in done.stdout


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    vfl.Recipe.from_dict(tables()).save(tmp_path / "plain.toml")
    for args, name in ((("--attacks", "nrm"), "attacks: "), (("--seeds", "one"), "--seeds: ")):
        done = vfl_here("leaks", "plain.toml", *args, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert name in error_line(done.stderr)
    (tmp_path / "file").touch()
    for more, name in ((["./plain.toml"], "plain.toml: "), (["--out", "file/below"], "out: ")):
        done = vfl_here("leaks", "plain.toml", "--attacks", "norm", *more, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        line = error_line(done.stderr)
        assert line.startswith(f"error: {name}")
        assert line == done.stderr.splitlines()[-1]
    wrong = tables(
        transforms=[{"kind": "iso", "exchange": "embeding", "sent_by": "active", "amplifier": 1.0}]
    )
    vfl.Recipe.from_dict(wrong).save(tmp_path / "wrong.toml")
    done = vfl_here("leaks", "wrong.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line = error_line(done.stderr)
    assert line.startswith("error: wrong.toml: phases: splitnn: transforms: ")
    assert "'embeding'" in line
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.leaks(tables(), seeds=[])


def test_sizes_tell_how_many_rows_there_are() -> None:
    found = vfl.leaks(tables(codec="bfloat16"), attacks=["norm"], quiet=True).found[0].sizes
    by_key = {(each.exchange, each.sender): each for each in found if each.phase == "splitnn"}
    up = by_key["embedding", "p1"]
    # 200 rows without validation and test.
    assert [int(number) for number in re.findall(r"\d+", up.tells)] == [160, 32, 2]
    assert up.sizes == ((32 * 8 * 2, 10),)
    assert by_key["embedding", "p0"].sizes == up.sizes


def printed_and_written(
    made: dict[str, Any], attacks: str, folder: Path
) -> tuple[str, dict[str, Any]]:
    """What the command prints for one recipe, in one line, and what leaks.json in the folder
    ``found`` has of it.
    """
    vfl.Recipe.from_dict(made).save(folder / "made.toml")
    done = vfl_here("leaks", "made.toml", "--attacks", attacks, "--out", "found", cwd=folder)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((folder / "found" / "leaks.json").read_text())["recipes"]
    return " ".join(done.stdout.split()), found


def test_times_tell_that_a_phase_ended_early_and_are_written(tmp_path: Path) -> None:
    short = tables(
        epochs=30, optimizer={"lr": 0.5}, early_stopping={"patience": 1, "metric": "loss"}
    )
    words, found = printed_and_written(short, "norm", tmp_path)
    trained = [each for each in found["times"] if each["phase"] == "splitnn"]
    by_way = {(each["exchange"], each["sender"], each["receiver"]): each for each in trained}
    up, down = by_way["embedding", "p1", "p0"], by_way["embedding", "p0", "p1"]
    rounds = by_way["verdict", "p1", "p0"]["messages"]
    assert rounds < 30
    # Batches of 160 rows in 32s.
    assert up["messages"] == down["messages"] == 5 * rounds
    (early,) = [each["tells"] for each in trained if f"{rounds} of 30 " in each["tells"]]
    assert_names(early, "30")
    assert early in words
    assert 0 < up["gap_s"] <= up["gap_high_s"]


NOISE = {
    "kind": "clipped_gaussian",
    "sent_by": "passive",
    "clip": 1.0,
    "epsilon": 5.0,
    "delta": 1e-5,
}


@pytest.mark.parametrize(
    ("phase", "gradients", "embeddings"),
    [
        ({}, "leave without a defence", "splitnn, evaluate"),
        (
            {"iso": 1.0},
            "leave with noise: attacks that average over all epochs",
            "splitnn, evaluate",
        ),
        (
            {"transforms": [NOISE | {"exchange": name} for name in ("embedding", "validation")]},
            "leave without a defence",
            "evaluate",
        ),
    ],
)
def test_the_report_of_a_run_says_that_labels_and_columns_can_be_read(
    phase: dict[str, object], gradients: str, embeddings: str, tmp_path: Path
) -> None:
    run = vfl.simulate(tables(**phase), out=tmp_path, quiet=True)
    words = " ".join(vfl_here("report", str(run.folder), cwd=tmp_path).stdout.split())
    assert f"Gradients of splitnn {gradients}" in words
    assert f"Embeddings of {embeddings} " in words
    told = words[words.index("Gradients of") :]
    assert_names(
        told.partition(" align: ")[0], "R² 0.87 from training", "the highest of four tables"
    )


@pytest.mark.parametrize(
    "twice", [{"attacks": ["norm", "cosine", "norm"]}, {"seeds": [0, 1, 0]}], ids=str
)
def test_what_is_named_twice_is_refused(twice: dict[str, Any]) -> None:
    """It would count as two seeds, with no deviation between them."""
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.leaks(tables(), quiet=True, **twice)


@pytest.mark.parametrize(
    "play",
    [lambda _: 1 / 0, lambda _: None, lambda _: [Figure("labels", "nothing", "AUC", float("nan"))]],
    ids=["raises", "gives None", "gives NaN"],
)
def test_an_attack_that_fails_takes_no_other_figure_along(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = kinds.load
    broken = Attack("a broken one", "passive", play, "gradients")
    monkeypatch.setattr(
        kinds, "load", lambda name, where: broken if name == "broken" else load(name, where)
    )
    found = vfl.leaks(tables(), attacks=["broken", "norm"], quiet=True).found[0]
    assert {line.attack for line in found.lines} == {"norm"}
    (note,) = [note for note in found.notes if note.startswith("broken by p1, p2 ")]
    assert_names(note, "p1", "p2")


def test_images_are_drawn_and_only_their_owner_may_read_them(tmp_path: Path) -> None:
    made = cases.recipe(2, rows={"validation": 0.2, "test": 0.3}) | {
        "simulate": {"parties": cases.digits(2, limit=600)}
    }
    made["phases"].append({"kind": "evaluate"})
    words, found = printed_and_written(made, "images,columns", tmp_path)
    assert "columns by p0 " in words
    assert "mean image 0." in words
    (line, *_) = found["lines"]
    assert (line["of"], line["unit"]) == ("p1: images", "SSIM")
    assert line["value"]["mean"] > line["baselines"]["mean image"]["mean"]
    picture = tmp_path / "found" / "images-case-p1.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert stat.S_IMODE(picture.stat().st_mode) == 0o600
    assert str(Path("found") / picture.name) in words


def test_labels_that_are_numbers_are_read_from_gradients_and_from_the_encoder(
    tmp_path: Path,
) -> None:
    made = cases.recipe(2, task={"kind": "regression"}, phase={"epochs": 3, "batch_size": 64})
    made |= {"simulate": {"parties": cases.columns("sklearn:diabetes", 2, limit=300)}}
    found = vfl.leaks(
        made, attacks=["residuals", "completion", "norm"], quiet=True, out=tmp_path
    ).found[0]
    lines = {(line.attack, line.knows): line for line in found.lines}
    first = lines["residuals", "nothing, first round"]
    assert first.value.mean > 0.8
    assert first.excess > 0.7
    assert {line.unit for line in lines.values()} == {"|ρ|", "R²"}
    assert [knows for attack, knows in lines if attack == "completion"] == [
        "80 labels, frozen",
        "80 labels, tuned",
    ]
    (note,) = [note for note in found.notes if note.startswith("norm by p1 ")]
    assert_names(note, "p1")
