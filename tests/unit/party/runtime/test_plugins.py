"""Encoders, data sources and metrics of plug-ins, and the versions that parties compare."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.memory import in_process
from tests.harness.plugins import metadata
from tests.harness.present import present
from vfl.simulation.inprocess import run_in_process
from vfl_common.bundle import PROTOCOL
from vfl_common.config.base import Section, parse
from vfl_common.config.data import DataSettings
from vfl_common.config.models import MlpSettings, ModelSettings, PluginSettings, TabularSettings
from vfl_common.config.party import load_party
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import TRAINING, OpenedParty, assemble, expect_rows, open_party
from vfl_party.base import plugins
from vfl_party.data import Table, load_table
from vfl_party.models import Encoder, InputSpec, Top, build_checked_encoder, needs_codes
from vfl_party.models.metrics import Metric, evaluate, lower_is_better
from vfl_party.phases.course import Course
from vfl_party.predict.run import prediction_data
from vfl_party.runtime import versions
from vfl_server.control.admission import MAX_PLUGINS, MAX_TEXT, admit

GUIDE = Path(__file__).parents[4] / "docs" / "how-to" / "plugins"
BINARY, REGRESSION = (
    TaskSettings(kind="binary", metrics=("mine",)),
    TaskSettings(kind="regression", metrics=("mine",)),
)
Installed = Callable[[str, Any], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """(group, export): what installs a plug-in that is called ``mine``."""
    # Or all of our tests would be a plug-in's code from now on.
    monkeypatch.setattr(plugins, "_loaded", {})

    def install(group: str, export: Any) -> None:
        metadata(
            tmp_path / group,
            {group: {"mine": f"{__name__}:EXPORTS.{group.partition('.')[2]}"}},
            name=group,
        )
        monkeypatch.setattr(EXPORTS, group.partition(".")[2], export, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path / group))

    return install


class EXPORTS:
    """What entry points of these tests name."""


def recipe(**more: Any) -> Recipe:
    return Recipe.model_validate(cases.recipe(2) | more)


# --- encoders


class Wide(Section):
    width: int = 3


def linear(settings: Wide, spec: InputSpec, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.LazyLinear(settings.width), nn.Linear(settings.width, size)
    )


def fails(_settings: Wide, _spec: InputSpec, _size: int) -> nn.Module:
    raise RuntimeError("no\nreally")


MINE = {"kind": "mine", "width": 5}
FLAT = InputSpec((4,))


def test_an_encoder_of_a_plug_in_has_settings_of_its_own(installed: Installed) -> None:
    installed("vfl.encoders", Encoder(Wide, linear))
    model = ModelSettings.model_validate({"embedding_size": 6, "encoder": MINE})
    assert model.encoder == PluginSettings(kind="mine", settings={"width": 5})
    # As a run's folder has it.
    assert ModelSettings.model_validate(model.model_dump(mode="json")) == model
    encoder = build_checked_encoder(model.encoder, FLAT, 6, party="p0")
    assert encoder[1].weight.shape == (5, 4)  # type: ignore[index]


def test_an_encoder_of_a_plug_in_may_ask_for_codes(installed: Installed) -> None:
    installed("vfl.encoders", Encoder(Wide, linear, takes_codes=True))
    assert needs_codes(PluginSettings(kind="mine"))
    assert needs_codes(TabularSettings(kind="tabular"))
    assert not needs_codes(MlpSettings())


def test_ours_are_parsed_as_ever() -> None:
    model = ModelSettings.model_validate(
        {"embedding_size": 6, "encoder": {"kind": "mlp", "hidden": [3]}}
    )
    assert model.encoder == MlpSettings(hidden=(3,))
    with raises(InputError, Code.CONFIG_INVALID, names=("hiden", "hidden")):
        parse(
            ModelSettings, {"embedding_size": 6, "encoder": {"kind": "mlp", "hiden": [3]}}, "recipe"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "own"),
    [
        ({"model": {"kind": "mpl"}}, None),
        ({"party": {"kind": "min"}}, None),
        ({}, {"kind": "nowhere"}),
        ({"model": {"kind": "mine", "widht": 3}}, None),
        ({"model": {"kind": "mine", "width": "x"}}, None),
    ],
)
def test_a_wrong_name_or_setting_is_found_where_it_is(
    changed: dict[str, Any], own: dict[str, Any] | None, installed: Installed
) -> None:
    installed("vfl.encoders", Encoder(Wide, linear))
    tables = cases.recipe(2)
    if "model" in changed:
        tables["model"]["encoder"] = changed["model"]
    if "party" in changed:
        tables["parties"][1]["encoder"] = changed["party"]
    mine = None if own is None else PluginSettings.model_validate(own)
    with raises(InputError, Code.CONFIG_INVALID):
        encoder_settings(Recipe.model_validate(tables), "p1", mine)


def test_a_party_without_features_needs_no_encoder() -> None:
    made = Recipe.model_validate(
        cases.recipe(2, active_features=False, model={"encoder": {"kind": "absent"}})
    )
    assert encoder_settings(made, "p0", None).kind == "absent"


@pytest.mark.parametrize(
    "export",
    [
        Encoder(Wide, fails),
        Encoder(Wide, lambda *_: 3),  # type: ignore[arg-type]
        linear,
        Encoder(Wide, lambda _s, _i, size: nn.Linear(9, size)),
    ],
)
def test_a_faulty_encoder_is_one_sentence(export: Any, installed: Installed) -> None:
    installed("vfl.encoders", export)
    with raises(InputError, Code.CONFIG_INVALID, Code.MODEL_INVALID):
        build_checked_encoder(PluginSettings(kind="mine"), FLAT, 6, party="p0")


# --- top models


def wide_top(settings: Wide, in_features: int, outputs: int) -> nn.Module:
    first = nn.Linear(in_features, settings.width)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(settings.width, outputs))


@pytest.mark.slow
def test_a_top_model_of_a_plug_in_has_settings_of_its_own(
    installed: Installed, tmp_path: Path
) -> None:
    installed("vfl.tops", Top(Wide, wide_top))
    tables = cases.recipe(2, model={"top": MINE, "combine": "sum"})
    made, data = Recipe.model_validate(tables), cases.digits(2)
    party = open_party(made, "p0", DataSettings(**data["p0"]), made.model.encoder)
    top = assemble(party, expect_rows(party)).party.models["top"]
    assert top[0].weight.shape == (5, 8)  # type: ignore[index]
    # All that the active party needs; the others do not need it.
    assert (
        set(versions.get_shared_versions(party))
        == {"vfl.tops:mine"}
        == set(versions.get_model_versions(party))
    )
    other = open_party(made, "p1", DataSettings(**data["p1"]), made.model.encoder)
    assert versions.get_shared_versions(other) == {} == versions.get_model_versions(other)
    summary = in_process(tmp_path / "run", tables, data)
    assert summary.steps > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top", "export"),
    [
        ({"kind": "nowhere"}, Top(Wide, wide_top)),
        ({"kind": "mine", "widht": 3}, Top(Wide, wide_top)),
        ({"kind": "mine"}, wide_top),
        ({"kind": "mine"}, Top(Wide, fails)),  # type: ignore[arg-type]
        ({"kind": "mine"}, Top(Wide, lambda *_: 3)),  # type: ignore[arg-type]
        ({"kind": "mine"}, Top(Wide, lambda _s, width, _o: nn.Linear(width, 9))),
    ],
)
def test_a_faulty_top_model_is_one_sentence(
    top: dict[str, Any], export: Any, installed: Installed
) -> None:
    installed("vfl.tops", export)
    made = Recipe.model_validate(cases.recipe(2, model={"top": top}))
    data = DataSettings(**cases.digits(2)["p0"])
    with raises(InputError, Code.CONFIG_INVALID, Code.MODEL_INVALID):
        opened = open_party(made, "p0", data, made.model.encoder)
        assemble(opened, expect_rows(opened))


# --- data sources


def load(source: str, *, with_label: bool = False, **settings: Any) -> Table:
    return load_table(DataSettings(source=source, **settings), with_label=with_label)


def test_a_source_of_a_plug_in_is_read_as_a_table(installed: Installed) -> None:
    asked: list[str] = []

    def read(rest: str) -> pa.Table:
        asked.append(rest)
        return pa.table({"who": ["b", "a"], "y": [1, 0], "x": [0.5, 1.5], "kind": ["u", "v"]})

    installed("vfl.sources", read)
    table = load("mine:some:where", id="who", label="y", drop=("kind",), with_label=True)
    assert asked == ["some:where"]
    assert (table.ids, table.numeric_names, table.categorical_names) == (("a", "b"), ("x",), ())
    assert present(table.labels).tolist() == [0.0, 1.0]
    assert load("mine:", id="who", label="y", limit=1).ids == ("b",)
    # A passive party's.
    assert load("mine:", id="who", label="y").labels is None


@pytest.mark.parametrize(
    "read",
    [
        lambda _rest: 1 / 0,
        lambda _rest: 3,
        lambda _rest: pa.table({"who": ["a"]}),
        lambda _rest: pa.table({"id": ["a"]}),
    ],
)
def test_a_faulty_source_is_one_sentence(read: Any, installed: Installed) -> None:
    installed("vfl.sources", read)
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID):
        load("mine:x", id="who")


def test_an_unknown_source_names_the_nearest() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("sklern:digits", "sklearn")):
        load("sklern:digits")


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("mine:a.csv", True),
        ("sklearn:iris", True),
        ("./mine:a.csv", False),
        ("C:\\a.csv", False),
        ("a.csv", False),
    ],
)
def test_paths_start_at_the_party_file_and_other_sources_stay(
    source: str, kept: bool, tmp_path: Path
) -> None:
    path = tmp_path / "p0.toml"
    path.write_text(
        'name = "p0"\nrecipe = "r.toml"\nserver = "s:1"\ntls = { ca = "a", certificate = '
        '"b", key = "c" }\n'
        f"data = {{ source = '{source}' }}\n"
    )
    data = present(load_party(path).data)
    assert data.source == (source if kept else str(tmp_path / source))
    assert data.is_table is not source.startswith("sklearn")


# --- metrics


def test_a_metric_gets_scores_and_targets_beside_ours(installed: Installed) -> None:
    got: list[torch.Tensor] = []

    def compute(scores: torch.Tensor, targets: torch.Tensor) -> float:
        got[:] = [scores, targets]
        return float((scores - targets).abs().mean())

    installed("vfl.metrics", Metric(compute, lower_is_better=True))
    found = evaluate(BINARY, torch.tensor([[0.0], [100.0]]), torch.tensor([[1.0], [1.0]]))
    assert found == {**evaluate(TaskSettings(kind="binary"), *_binary()), "mine": 0.25}
    assert [each.dtype for each in got] == [torch.float64] * 2
    evaluate(REGRESSION, torch.tensor([[2.0]]), torch.tensor([[3.0]]), lambda x: 10 * x)
    # In the label's unit.
    assert [each.item() for each in got] == [20.0, 30.0]
    three = TaskSettings(kind="multiclass", classes=3, metrics=("mine",))
    evaluate(three, torch.zeros(1, 3), torch.tensor([2]).expand(1))
    assert got[0].tolist() == [[pytest.approx(1 / 3)] * 3]
    assert got[1].dtype == torch.int64
    assert lower_is_better(BINARY, "mine")
    assert lower_is_better(BINARY, "loss")
    assert not lower_is_better(BINARY, "auc")


def _binary() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[0.0], [100.0]]), torch.tensor([[1.0], [1.0]])


def test_a_metric_that_is_undefined_is_left_out(installed: Installed) -> None:
    installed("vfl.metrics", Metric(lambda _scores, _targets: None))
    assert "mine" not in evaluate(BINARY, *_binary())


@pytest.mark.parametrize(
    "export",
    [
        Metric(lambda *_: float("nan")),
        Metric(lambda *_: float("-inf")),
        Metric(lambda *_: "x"),  # type: ignore[arg-type]
        Metric(lambda *_: 1 / 0),
        len,
    ],
)
def test_a_faulty_metric_is_one_sentence(export: Any, installed: Installed) -> None:
    installed("vfl.metrics", export)
    with raises(InputError, Code.CONFIG_INVALID, names=("mine", "task.metrics")):
        evaluate(BINARY, *_binary())


@pytest.mark.parametrize("names", [["auc"], ["mine", "mine"]])
def test_a_metric_is_named_once(names: list[str]) -> None:
    task = {"kind": "binary", "metrics": names}
    with raises(InputError, Code.CONFIG_INVALID):
        parse(TaskSettings, task, "task")


def run(folder: Path, made: Recipe) -> dict[str, dict[str, float]]:
    data = {name: DataSettings(**each) for name, each in cases.digits(2).items()}
    return run_in_process(made, data, folder / "run").metrics


def stopping(metric: str) -> dict[str, Any]:
    phase = {"kind": "splitnn", "epochs": 6, "early_stopping": {"patience": 1, "metric": metric}}
    task = {"kind": "multiclass", "classes": 10, "metrics": ["mine"]}
    return cases.recipe(2, task=task) | {"phases": [phase, {"kind": "evaluate"}], "simulate": {}}


@pytest.mark.parametrize(("falls", "rounds"), [(True, 6), (False, 2)])
def test_early_stopping_by_a_metric_of_a_plug_in(
    falls: bool, rounds: int, tmp_path: Path, installed: Installed
) -> None:
    values: list[float] = []

    def compute(_scores: torch.Tensor, _targets: torch.Tensor) -> float:
        # It falls.
        values.append(-float(len(values)))
        return values[-1]

    installed("vfl.metrics", Metric(compute, lower_is_better=falls))
    metrics = run(tmp_path, Recipe.model_validate(stopping("mine")))
    # A validation a round; both splits in the end.
    assert len(values) == rounds + 2
    assert metrics["test"]["mine"] == values[-1]


@pytest.mark.parametrize("metric", ["loss", "mein"])
def test_an_unknown_metric_is_refused_before_the_run(metric: str, installed: Installed) -> None:
    if metric == "mein":
        installed("vfl.metrics", Metric(lambda *_: 0.0))
    made = Recipe.model_validate(stopping(metric))
    opened = open_party(made, "p0", DataSettings(**cases.digits(2)["p0"]), made.model.encoder)
    with raises(InputError, Code.CONFIG_INVALID, names=("mine", "task.metrics")):
        assemble(opened, expect_rows(opened))


# --- versions


def test_a_party_says_what_the_recipe_names_and_keeps_to_itself_what_is_its_own(
    installed: Installed,
) -> None:
    for group in ("encoders", "sources", "metrics", "codecs", "transforms", "methods"):
        installed(f"vfl.{group}", None)
    mine = PluginSettings(kind="mine")
    phase = {"kind": "mine", "codec": "mine", "transforms": [{"kind": "mine", "exchange": "x"}]}
    task = {"kind": "binary", "metrics": ["mine"]}
    made = recipe(
        task=task,
        phases=[phase, {"kind": "evaluate"}],
        model={"embedding_size": 3, "encoder": {"kind": "mine"}},
    )

    def opened(name: str, encoder: Any, source: str) -> OpenedParty:
        data = DataSettings(source=source)
        return OpenedParty(Course(made), name, data, encoder, Table("x", ()), TRAINING)

    def names(found: Mapping[str, str]) -> set[str]:
        assert all(version == f"{key.partition(':')[0]} 1.0" for key, version in found.items())
        return {key.removeprefix("vfl.").removesuffix(":mine") for key in found}

    active, passive = opened("p0", mine, "a.csv"), opened("p1", MlpSettings(), "mine:x")
    assert names(versions.get_shared_versions(active)) == {
        "methods",
        "codecs",
        "transforms",
        "metrics",
        "encoders",
    }
    assert names(versions.get_shared_versions(passive)) == {"methods", "codecs", "transforms"}
    assert names(versions.get_model_versions(active)) == {"methods", "encoders"}
    assert names(versions.get_model_versions(passive)) == {"methods"}
    assert names(versions.get_reader_versions(active)) == set()
    assert names(versions.get_reader_versions(passive)) == {"sources"}


def test_without_plug_ins_there_is_nothing_to_say() -> None:
    made = recipe()
    opened = open_party(made, "p0", DataSettings(**cases.digits(2)["p0"]), made.model.encoder)
    assert (
        versions.get_shared_versions(opened)
        == versions.get_model_versions(opened)
        == versions.get_reader_versions(opened)
        == {}
    )


def joining(name: str, plugins: Mapping[str, str]) -> control_pb2.Join:
    role = "active" if name == "p0" else "passive"
    json = recipe().canonical_json()
    return control_pb2.Join(
        role=role, protocol=PROTOCOL, recipe_json=json, job="train", plugins=plugins
    )


def test_a_party_with_another_version_may_not_join() -> None:
    first = {"p0": joining("p0", {"vfl.codecs:mine": "pack 1.0", "vfl.metrics:mine": "pack 1.0"})}
    admit("p1", joining("p1", {"vfl.codecs:mine": "pack 1.0"}), recipe(), "train", first)
    # p0 does not need it.
    admit("p1", joining("p1", {"vfl.encoders:mine": "pack 2.0"}), recipe(), "train", first)
    admit("p1", joining("p1", {"vfl.codecs:mine": "pack 2.0"}), recipe(), "train", {})
    with raises(PeerError, Code.PLUGINS_DIFFER, names=("vfl.codecs", "p1")) as caught:
        admit("p1", joining("p1", {"vfl.codecs:mine": "pack 2.0"}), recipe(), "train", first)
    assert (caught.value.code, caught.value.party, caught.value.exit_code) == (
        Code.PLUGINS_DIFFER,
        "p1",
        2,
    )


def test_what_a_party_says_of_its_plug_ins_is_one_short_line() -> None:
    said = joining("p1", {"a\nb": "x\x1b[2J" + "y" * 150})
    with pytest.raises(PeerError) as caught:
        admit("p1", said, recipe(), "train", {"p0": joining("p0", {"a\nb": "1"})})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "plugins",
    [
        {str(n): "1" for n in range(MAX_PLUGINS + 1)},
        {"x" * (MAX_TEXT + 1): "1"},
        {"x": "1" * (MAX_TEXT + 1)},
    ],
    ids=["many", "long name", "long version"],
)
def test_too_much_is_refused(plugins: dict[str, str]) -> None:
    admit(
        "p1",
        joining("p1", {str(n): "1" * MAX_TEXT for n in range(MAX_PLUGINS)}),
        recipe(),
        "train",
        {},
    )
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1", "100")):
        admit("p1", joining("p1", plugins), recipe(), "train", {})


def test_a_run_needs_the_versions_with_which_it_began() -> None:
    then = {"vfl.codecs:mine": "pack 1.0", "vfl.methods:gone": "pack 1.0"}
    versions.require_same(
        Path("runs/x"), then, {"vfl.codecs:mine": "pack 1.0", "vfl.encoders:new": "pack 9"}
    )
    with raises(InputError, Code.CONFIG_INVALID, names=("vfl.codecs", "1.0")):
        versions.require_same(Path("runs/x"), then, {"vfl.codecs:mine": "pack 1.1"})


# --- the pages of plug-ins


def of_guide(module: str) -> dict[str, Any]:
    """What a module has that stands in a page alone, and in no file of the example."""
    text = "\n".join(page.read_text() for page in sorted(GUIDE.glob("*.md")))
    (code,) = re.findall(rf"^```python\n(# {module}.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own document
    return names


def test_the_guides_data_source_reads_a_database(tmp_path: Path, installed: Installed) -> None:
    installed("vfl.sources", of_guide("mysource")["read"])
    with closing(sqlite3.connect(tmp_path / "bank.db")) as database:
        database.execute("CREATE TABLE customers (id INTEGER, age REAL, town TEXT)")
        database.executemany(
            "INSERT INTO customers VALUES (?, ?, ?)", [(2, 40.5, "Bern"), (1, 20.0, None)]
        )
        database.commit()
    table = load(f"mine:{tmp_path / 'bank.db'}:customers", id="id")
    assert (table.ids, table.numeric_names, table.categorical_names) == (
        ("1", "2"),
        ("age",),
        ("town",),
    )


def test_the_guides_data_set_is_prepared_and_trains(tmp_path: Path, installed: Installed) -> None:
    installed("vfl.datasets", of_guide("mydataset")["DATASET"])
    numbers = np.random.default_rng(0).normal(size=(60, 4)).round(3)
    lines = [",".join(map(str, row)) + f",{int(row.sum() > 0)}" for row in numbers]
    (tmp_path / "wine.csv").write_text("\n".join(["a,b,c,d,good", *lines]))
    found = vfl.prepare("mine", tmp_path, tmp_path / "out", validation=0.2)
    assert "The files have 60 rows (published: 1,599)." in found.notes
    assert pd.read_parquet(found.parties["party-2"]).columns.tolist() == ["id", "c", "d"]
    recipe = vfl.Recipe.load(found.recipe).replace({"phases.0.epochs": 1})
    assert vfl.simulate(recipe, quiet=True, out=tmp_path / "runs").metrics["validation"]


def test_the_guides_metric_is_the_brier_score(installed: Installed) -> None:
    installed("vfl.metrics", of_guide("mymetric")["METRIC"])
    assert evaluate(BINARY, torch.zeros(4, 1), torch.ones(4, 1))["mine"] == 0.25
    assert lower_is_better(BINARY, "mine")


def test_the_library_and_predictions_take_such_a_source(
    tmp_path: Path, installed: Installed
) -> None:
    rows: dict[str, list[Any]] = {
        "id": [str(number) for number in range(40)],
        "x": [float(number % 7) for number in range(40)],
    }
    read = {
        "p0": pa.table(rows | {"y": [number % 2 for number in range(40)]}),
        "p1": pa.table(rows),
    }
    installed("vfl.sources", read.__getitem__)
    tables = cases.recipe(2, task={"kind": "binary"}) | {
        "phases": [{"kind": "splitnn", "epochs": 1}]
    }
    data = {"p0": vfl.Data("mine:p0", id="id", label="y"), "p1": vfl.Data("mine:p1", id="id")}
    run = vfl.simulate(tables, data, out=tmp_path / "runs")
    # No label is needed.
    found = run.predict({"p0": "mine:p1", "p1": "mine:p1"})
    assert sorted(found["id"]) == sorted(rows["id"])
    state = {"preprocessor": None}
    assert prediction_data(DataSettings(source="a.csv"), "mine:p1", state).source == "mine:p1"
