"""Functions and classes that a call of the library is given, instead of packages: in this process,
and over processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vfl
from tests.harness import cases, given
from tests.harness.errors import assert_names, raises
from tests.harness.memory import parameters
from tests.harness.plugins import EXAMPLE, metadata
from vfl.api import Combination, Method, Party, Phase, RoundReport, Section
from vfl.library.plugins import get_import_paths, with_plugins
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import GROUPS, PlugIns, get_run_plugins, use_plugins
from vfl_party.models.metrics import load_metric
from vfl_party.models.top import AttentionPooling


class BrokenSettings(Section):
    at: str


USES = [
    {"kind": "halved", "exchange": "embedding"},
    {"kind": "rounded", "exchange": "embedding"},
    {"kind": "cut", "exchange": "embedding", "most": 0.75},
]


def tables(**more: Any) -> dict[str, Any]:
    """A recipe of two parties that names one of each group."""
    made = cases.recipe(
        2,
        task={
            "kind": "binary",
            "loss": {"kind": "tilted", "tilt": 0.5},
            "metrics": ["quadratic", "low_quadratic"],
        },
        model={
            "encoder": {"kind": "wide", "width": 6},
            "combine": {"kind": "gated", "sharpness": 2.0},
            "top": {"kind": "deep", "width": 4},
        },
        phase={"epochs": 2, "codec": "half_bits", "transforms": USES},
    )
    made["phases"].append({"kind": "evaluate", "codec": "half_bits"})
    parties = {
        "p0": {"source": "counted:120", "id": "id", "label": "target", "columns": ["a"]},
        "p1": {"source": "counted:120", "id": "id", "columns": ["b"]},
    }
    return made | {"simulate": {"parties": parties}} | more


def test_what_is_given_computes_what_a_package_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = vfl.simulate(tables(), plugins=given.ALL, quiet=True)
    for name in ("quadratic", "low_quadratic"):
        assert ours.metrics["test"][name] == ours.metrics["test"]["quadratic"] > 0.0
    chains = {line.chain for line in ours.summary.exchanges if line.exchange == "embedding"}
    assert "halved -> rounded to 1/64 -> cut at 0.75 -> half" in chains
    # Installed.
    with with_plugins(given.ALL):
        named = get_import_paths("")
    points = {f"vfl.{group}": of for group, of in named.items()}
    metadata(tmp_path, points, name="given")
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = vfl.simulate(tables(), quiet=True)
    assert theirs.metrics == ours.metrics
    for name in ("p0", "p1"):
        want, got = parameters(theirs.folder / name), parameters(ours.folder / name)
        assert all(torch.equal(got[key], want[key]) for key in want)
    # It needs no more than the run.
    new = {name: given.counted("30") for name in ("p0", "p1")}
    rows = {name: {key: of[key] for key in ("id", "a", "b")} for name, of in new.items()}
    assert len(ours.predict(rows)["id"]) == 30
    assert ours.model("p1").encoder is not None


def test_processes_compute_the_same_with_what_they_can_import() -> None:
    ours = vfl.simulate(tables(), plugins=given.ALL, quiet=True)
    forecast = vfl.forecast(tables(), plugins=given.ALL)
    assert forecast.by_phase["splitnn"] == ours.bytes.by_phase["splitnn"]
    theirs = vfl.simulate(tables(), plugins=given.ALL, quiet=True, processes=True)
    assert theirs.metrics == ours.metrics
    assert theirs.bytes.by_phase["splitnn"] == ours.bytes.by_phase["splitnn"]
    for name in ("p0", "p1"):
        want, got = parameters(theirs.folder / name), parameters(ours.folder / name)
        assert all(torch.equal(got[key], want[key]) for key in want)
    assert theirs.model("p1").encoder is not None


def test_a_study_takes_them_in_one_process_and_in_several() -> None:
    over = {"phases.splitnn.transforms.cut.most": [0.25, 0.75]}
    one, two = (
        vfl.study(tables(), over, plugins=given.ALL, quiet=True, jobs=jobs) for jobs in (1, 2)
    )
    assert one.columns() == two.columns()
    first, second = one.columns()["test quadratic"]
    assert first != second
    # It knows of a given metric which direction is better.
    found = vfl.study(tables(), over, plugins=given.ALL, seeds=[1, 2, 3], quiet=True)
    high, low = (found.compare(0.25, 0.75, f"test {each}quadratic") for each in ("", "low_"))
    assert high.mean == low.mean
    opposite = {"better": "worse", "worse": "better"}
    assert low.verdict == opposite.get(high.verdict, high.verdict)


def test_attacks_of_one_s_own_are_played() -> None:
    found = vfl.leaks(tables(), plugins=given.ALL, attacks=["counts"], quiet=True).found[0]
    (line,) = found.lines
    assert (line.attack, line.attacker) == ("counts", "p1")


def test_a_policy_decides_what_leaves_its_party() -> None:
    plain = vfl.simulate(tables(), plugins=given.ALL, quiet=True)
    simulate = tables()["simulate"] | {"policies": {"p1": "no_gradients"}}
    run = vfl.simulate(tables(simulate=simulate), plugins=given.ALL, quiet=True)
    # A passive party sends no gradients.
    assert run.metrics == plain.metrics
    for processes in (False, True):
        with raises(vfl.VflError, Code.REFUSED, Code.CONFIG_INVALID):
            vfl.simulate(
                tables(simulate=simulate | {"policies": {"p0": "no_gradients"}}),
                plugins=given.ALL,
                quiet=True,
                processes=processes,
            )
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.simulate(tables(simulate=simulate | {"policies": {"p9": "allow_all"}}), quiet=True)


@pytest.mark.parametrize(
    "plugins",
    [
        [],
        {"metric": {}},
        {"cats": {}},
        {"metrics": given.quadratic},
        {"metrics": {"Quadratic": given.quadratic}},
        {"metrics": {"quadratic": 3}},
        {"metrics": {"quadratic": given.Wide}},
        {"transforms": {"halved": "halved"}},
        {"transforms": {"iso": given.halved}},
        {"sources": {"sklearn": given.counted}},
        {"encoders": {"mlp": given.WIDE}},
        {"metrics": {"brier": given.quadratic}},
        {"metrics": {"auc": given.quadratic}},
        {"metrics": {"top_3": given.quadratic}},
        {"losses": {"focal": given.entropy}},
        {"combinations": {"mean": given.side_by_side}},
    ],
    ids=[
        "no table", "near", "far", "no names", "a name", "no metric", "a class", "no transform",
        "our transform", "our source", "our encoder", "our metric",
        "a metric that is always computed", "one of many",
        "our loss", "our combination",
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_one_sentence(plugins: Any) -> None:
    parties = cases.columns("sklearn:breast_cancer", 2, limit=100)
    made = cases.recipe(2, task={"kind": "binary"}) | {"simulate": {"parties": parties}}
    groups = plugins if isinstance(plugins, dict) else {}
    if isinstance(groups.get("metrics"), dict) and "quadratic" in groups["metrics"]:
        made["task"]["metrics"] = ["quadratic"]
    for kind in groups.get("transforms", ()):
        made["phases"][0]["transforms"] = [{"kind": kind, "exchange": "embedding"}]
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.simulate(made, plugins=plugins, quiet=True)


@pytest.mark.parametrize("more", [{}, {"class_weight": "balanced"}], ids=["all alike", "balanced"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_of_one_s_own_trains_as_ours_with_the_same_definition(
    more: dict[str, Any], parts: int
) -> None:
    parties = cases.columns("sklearn:breast_cancer", 2, limit=100)
    found = []
    for own in ({}, {"loss": "entropy"}):
        made = cases.recipe(
            2,
            task={"kind": "binary"} | more | own,
            model={"encoder": {"kind": "mlp", "hidden": [4], "dropout": 0.0}},
            phase={"epochs": 3, "micro_batches": parts, "optimizer": {"kind": "sgd", "lr": 0.1}},
        )
        given_here = {"losses": {"entropy": given.entropy}} if own else None
        found.append(
            vfl.simulate(made | {"simulate": {"parties": parties}}, plugins=given_here, quiet=True)
        )
    ours, theirs = found
    for name in ("p0", "p1"):
        want, got = parameters(ours.folder / name), parameters(theirs.folder / name)
        assert want.keys() == got.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-6)
    losses = [run.metrics["validation"]["loss"] for run in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: given.entropy(outputs, targets).mean(),
        lambda outputs, targets: given.entropy(outputs, targets).double(),
        lambda outputs, targets: given.entropy(outputs, targets).detach(),
        lambda outputs, targets: 1.0,
        lambda outputs, targets: outputs @ outputs,
        given.CUT,
    ],
    ids=["a mean", "another type", "no gradient", "no tensor", "fails", "another plug-in"],
)
def test_a_loss_that_is_none_is_one_sentence(loss: Any) -> None:
    parties = cases.columns("sklearn:breast_cancer", 2, limit=100)
    made = cases.recipe(2, task={"kind": "binary", "loss": "odd"}, phase={"epochs": 1})
    with raises(InputError, Code.CONFIG_INVALID, names=("odd", "task.loss")):
        vfl.simulate(
            made | {"simulate": {"parties": parties}}, plugins={"losses": {"odd": loss}}, quiet=True
        )


def pooled(_: Section, width: int, embeddings: int) -> nn.Module:
    return AttentionPooling(width)


@pytest.mark.parametrize(
    ("ours", "own"),
    [("concat", given.side_by_side), ("attention", Combination(Section, pooled))],
    ids=["a function", "a module that learns"],
)
def test_a_combination_of_one_s_own_trains_as_ours_with_the_same_definition(
    ours: str, own: Any
) -> None:
    parties = cases.columns("sklearn:breast_cancer", 3, limit=100)
    found = []
    for rule in (ours, "own"):
        made = cases.recipe(
            3,
            task={"kind": "binary"},
            model={"combine": rule, "encoder": {"kind": "mlp", "hidden": [4]}},
            phase={"epochs": 2},
        )
        made["phases"].append({"kind": "evaluate"})
        plugins = {"combinations": {"own": own}} if rule == "own" else None
        simulated = made | {"simulate": {"parties": parties}}
        found.append(vfl.simulate(simulated, plugins=plugins, quiet=True))
    want, got = found
    assert got.metrics == want.metrics
    for name in ("p0", "p1", "p2"):
        ends = [list(parameters(run.folder / name).values()) for run in (want, got)]
        assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize(
    "own",
    [
        lambda z_BKD: z_BKD,
        lambda z_BKD: z_BKD.sum(dim=1).double(),
        lambda z_BKD: z_BKD.reshape(3, -1),
        lambda z_BKD: 1.0,
        Combination(Section, lambda *_: given.Gated),  # type: ignore[arg-type]
        given.GATED,
        given.Gated,
    ],
    ids=["shape", "type", "fails", "no tensor", "no module", "lacks a setting", "a class"],
)
def test_a_combination_that_is_none_is_one_sentence(own: Any) -> None:
    parties = cases.columns("sklearn:breast_cancer", 2, limit=100)
    made = cases.recipe(2, task={"kind": "binary"}, model={"combine": "own"})
    with raises(InputError, Code.CONFIG_INVALID, Code.MODEL_INVALID, names="model.combine"):
        vfl.simulate(
            made | {"simulate": {"parties": parties}},
            plugins={"combinations": {"own": own}},
            quiet=True,
        )


def test_what_one_run_was_given_no_other_finds() -> None:
    vfl.simulate(tables(), plugins=given.ALL, quiet=True)
    assert get_run_plugins() == {}
    with raises(InputError, Code.CONFIG_INVALID, names=("wide", "model.encoder")):
        vfl.simulate(tables(), quiet=True)
    found: list[object] = []

    def look() -> None:
        found.append(get_run_plugins())

    with use_plugins({"metrics": {"quadratic": given.quadratic}}):
        assert load_metric("quadratic").compute is given.quadratic
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [{}]


def test_every_group_of_ours_may_be_given() -> None:
    """A new kind of plug-in is also for notebooks."""
    import vfl_papers.prepare  # noqa: F401 - these have registries
    import vfl_party.runtime.versions  # noqa: F401 - it imports all others

    loaded = [vars(module).values() for name, module in sys.modules.items() if "vfl" in name]
    registries = {each for of in loaded for each in of if isinstance(each, PlugIns)}
    # No run knows a data set of ``vfl prepare``.
    assert {each.group.removeprefix("vfl.") for each in registries} - {"datasets"} == {*GROUPS}


# -- a script, whose objects no other process can import

SCRIPT = """
import json, sys
import vfl
from vfl.api import Filter
tables = json.loads(sys.argv[1])

def quadratic(scores, targets):
    return (scores - targets).square().mean()

class Fails(Filter):
    def apply(self, tensors):
        raise KeyError("mine")

def said(**how):
    try:
        return vfl.simulate(tables, quiet=True, **how).metrics["validation"]["quadratic"]
    except vfl.VflError as error:
        return str(error)

mine = {"metrics": {"quadratic": quadratic}}
print(json.dumps([
    said(plugins=mine),
    said(plugins=mine, processes=True),
    said(plugins=mine | {"transforms": {"fails": Fails}}),
]))
"""


def test_a_script_s_own_are_for_its_process_alone(tmp_path: Path) -> None:
    parties = cases.columns("sklearn:breast_cancer", 2, limit=100)
    made = cases.recipe(2, task={"kind": "binary", "metrics": ["quadratic"]}, phase={"epochs": 1})
    made["simulate"] = {"parties": parties}
    here = json.loads(_script(tmp_path, made))
    assert 0.0 < here[0] < 0.5
    assert_names(here[1], "processes")
    made["phases"][0]["transforms"] = [{"kind": "fails", "exchange": "embedding"}]
    last = json.loads(_script(tmp_path, made))[2]
    assert_names(last, "mine")
    assert "script.py, line " in last


def _script(folder: Path, made: dict[str, Any]) -> str:
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), json.dumps(made)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_beside_the_script_are_found_by_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a method, which is an object that does not know its name."""
    (tmp_path / "beside").mkdir()
    text = (EXAMPLE / "plain_split.py").read_text()
    (tmp_path / "beside" / "my_method.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "beside"))
    import importlib

    mine = importlib.import_module("my_method")
    made = cases.recipe(2) | {"simulate": {"parties": cases.digits(2)}}
    made["phases"] = [{"kind": "mine", "name": "splitnn", "epochs": 2, "batch_size": 24}]
    plugins = {"methods": {"mine": mine.METHOD}}
    ours, theirs = (
        vfl.simulate(made, plugins=plugins, quiet=True, processes=processes)
        for processes in (False, True)
    )
    for name in ("p0", "p1"):
        want, got = parameters(theirs.folder / name), parameters(ours.folder / name)
        assert all(torch.equal(got[key], want[key]) for key in want)


class Broken(Phase):
    """Fails where its settings say."""

    def __init__(self, party: Party, name: str, settings: BrokenSettings) -> None:
        _ = party
        self.name, self.rounds, self._at = name, 1, settings.at

    def keep(self, folder: Path) -> None:
        if self._at == "keep":
            raise KeyError("mine")

    def run_round(self, round_: int) -> RoundReport:
        raise KeyError("mine")


@pytest.mark.parametrize("at", ["keep", "round"])
def test_an_error_of_a_method_that_is_given_is_a_sentence_with_its_line(at: str) -> None:
    parties = cases.columns("sklearn:breast_cancer", 2, limit=100)
    made = cases.recipe(2, task={"kind": "binary"}) | {"simulate": {"parties": parties}}
    made["phases"] = [{"kind": "broken", "at": at}]
    method = Method(BrokenSettings, Broken, Broken)
    with raises(InputError, Code.CONFIG_INVALID, names=("mine", "test_given_plugins")) as raised:
        vfl.simulate(made, plugins={"methods": {"broken": method}}, quiet=True)
    assert "test_given_plugins.py, line " in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)


def test_the_names_for_plug_ins_cost_nothing_until_they_are_asked_for() -> None:
    code = "import sys, vfl.api; vfl.api.Section; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
