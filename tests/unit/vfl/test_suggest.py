"""What `vfl forecast --suggest` and `--measure` find out."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import raises
from vfl.forecasting import suggest
from vfl.forecasting.network import BatchWork, Network
from vfl.forecasting.show import compute_batch_work, measure_computation, shorten_phases
from vfl.forecasting.suggest import Scope, change_settings, describe_cost, make_suggestions
from vfl.summary.table import wide_console
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import PartySummary, PhaseTimes, Summary
from vfl_party.forecast.count import forecast_of, lone_party, outlook_of, read_outlook
from vfl_party.phases.context import with_course
from vfl_party.phases.course import Course

HERE = Path(__file__).parent


def recipe(**training: Any) -> Recipe:
    phase = {"kind": "splitnn", "epochs": 3, "batch_size": 64} | training
    return Recipe.model_validate(cases.recipe(3) | {"phases": [phase, {"kind": "evaluate"}]})


def test_each_setting_has_its_sentence() -> None:
    assert describe_cost(32, 1) == ""
    assert describe_cost(32, 2) == "gradients are 1 update old"
    assert (
        describe_cost(4, 4) == "gradients are 3 updates old; values are rounded to 16 levels a row"
    )
    assert describe_cost(16, 1) == "values keep 11 bits"


def test_the_wire_is_said_as_a_recipe_says_it() -> None:
    scope = Scope(("a",), (("a", None), ("b", None), ("b", "weights")))
    assert scope.phases == ("a", "b")
    assert scope.wire(32) == []
    assert scope.wire(16)[:1] == [{"phase": "a", "codec": "float16"}]
    between = [{"phase": name, "codec": "bits", "bits": 4} for name in ("a", "b")]
    assert scope.wire(4) == [
        *between,
        {"phase": "b", "exchange": "weights", "codec": "bits", "bits": 8},
    ]


def test_the_recipe_as_it_is_stays_what_it_is() -> None:
    given = recipe()
    assert change_settings(given, Scope(("splitnn",), (("splitnn", None),)), 32, 1) == given


class _Piped:
    """A recipe that refuses codecs, and so many steps in flight."""

    def __init__(self, patch: pytest.MonkeyPatch, refuses: int = 0) -> None:
        self.refuses = refuses
        patch.setattr(suggest, "change_settings", self.changed)

    def changed(self, given: Recipe, scope: Scope, bits: int, in_flight: int) -> Recipe:
        if bits < 32 or (self.refuses and in_flight >= self.refuses):
            raise InputError(Code.CONFIG_INVALID, f"no {bits} bits")
        return change_settings(given, scope, bits, in_flight)


def test_the_mildest_of_the_soonest_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 50 ms of latency a step waits; sixteen in flight are as good as it gets here, and the
    bytes stay the same.
    """
    given = recipe(epochs=40)
    party, rows = lone_party(outlook_of(given, HERE), 10_000)
    _Piped(monkeypatch)
    found = make_suggestions(party, rows, Network(1e9, 0.05))
    assert found.phases == ("splitnn", "evaluate")
    assert [each.in_flight for each in found.tried] == [1, 2, 4, 8, 16]
    assert len({each.message_bytes for each in found.tried}) == 1
    times = [each.seconds for each in found.tried]
    assert times == sorted(times, reverse=True)
    assert found.best.seconds <= 1.1 * min(times)
    assert found.best.in_flight == 16 or found.best.seconds <= times[-1] * 1.1
    assert f"in_flight = {found.best.in_flight}" in found.toml
    # 16, 8, 4 and 2 bits, each once.
    assert len(found.refused) == 4
    assert found.waits > 0.9
    told = found.as_json()
    assert told["best"]["cost"].startswith("gradients are")
    assert len(told["tried"]) == 5


def test_a_link_that_holds_nothing_up_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    party, rows = lone_party(outlook_of(recipe(), HERE), 1000)
    _Piped(monkeypatch)
    found = make_suggestions(party, rows, Network(1e12, 0.0, any_work=BatchWork(0.01, 0.01)))
    assert (found.best.bits, found.best.in_flight, found.toml) == (32, 1, "")
    wide_console().print(found.render())
    assert "The recipe is best unchanged" in capsys.readouterr().out


def test_a_round_of_few_steps_gets_few_in_flight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe of 16 is never full in a round of 11 steps: its gradients would not be 15 updates
    old.
    """
    party, rows = lone_party(outlook_of(recipe(), HERE), 1000)
    _Piped(monkeypatch)
    found = make_suggestions(party, rows, Network(1e9, 0.05))
    runs = next(phase.runs for phase in forecast_of(party, rows).phases if phase.name == "splitnn")
    steps = min(run.steps for run in runs if run.trains)
    assert 8 <= steps < 16
    assert [each.in_flight for each in found.tried] == [1, 2]
    wide_console().print(found.render())
    shown = capsys.readouterr().out
    assert f"Not tried: more than 2 in flight: a round has {steps} steps" in shown
    assert "of the recipe's time is latency. A larger batch_size has fewer steps" in shown
    assert "# into the table [[phases]] of splitnn:\nin_flight = 2" in shown


def seconds_and_bytes(given: Recipe, network: Network) -> tuple[float, int]:
    """What a forecast of a recipe says."""
    found = forecast_of(*lone_party(outlook_of(given, HERE), 10_000))
    seconds = sum(network.seconds(phase.name, phase.runs) for phase in found.phases)
    return seconds, sum(link.message_bytes for link in found.links)


@pytest.mark.parametrize("own", [{}, {"in_flight": 8, "micro_batches": 2}], ids=str)
def test_what_is_pasted_has_the_seconds_and_bytes_of_its_line(own: dict[str, Any]) -> None:
    """Also in a recipe that has settings of its own, which the suggestion takes the place of."""
    tables = recipe(**own).model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        phase |= phase.pop("settings", {})
    given = Recipe.model_validate(
        tables | ({"wire": [{"codec": "bits", "bits": 2}]} if own else {})
    )
    network = Network(1e7, 0.025)
    found = make_suggestions(*lone_party(outlook_of(given, HERE), 10_000), network)
    assert found.own == seconds_and_bytes(given, network)
    scope = Scope(("splitnn",), (("splitnn", None), ("evaluate", None)))
    for each in (found.best, found.tried[0], found.tried[-1]):
        pasted = change_settings(given, scope, each.bits, each.in_flight)
        assert (each.seconds, each.message_bytes) == seconds_and_bytes(pasted, network)
    wire = tomllib.loads(found.toml.partition("# at the end")[2].partition("\n")[2])["wire"]
    assert wire == scope.wire(found.best.bits)
    assert ("instead of in_flight = 8" in found.toml) == bool(own)
    assert ("instead of all tables [[wire]]" in found.toml) == bool(own)


@pytest.mark.slow
def test_a_part_has_at_least_one_row() -> None:
    """More parts than a batch has rows are as many parts as it has rows, and take as long."""
    network = Network(1e7, 0.1)
    many, rows = (recipe(batch_size=8, micro_batches=m) for m in (64, 8))
    assert seconds_and_bytes(many, network) == seconds_and_bytes(rows, network)


def test_a_recipe_that_is_packed_for_nothing_is_told_to_unpack() -> None:
    given = recipe(in_flight=8)
    tables = given.model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        phase |= phase.pop("settings", {})
    given = Recipe.model_validate(tables | {"wire": [{"codec": "bits", "bits": 2}]})
    found = make_suggestions(
        *lone_party(outlook_of(given, HERE), 10_000),
        Network(1e12, 0.0, any_work=BatchWork(0.01, 0.01)),
    )
    assert (found.best.bits, found.best.in_flight) == (32, 1)
    assert "in_flight = 8:\nin_flight = 1" in found.toml
    assert "# remove all tables [[wire]]" in found.toml


def test_averages_get_eight_bits() -> None:
    """Nearly all bytes of FedHSSL are its averages."""
    examples = HERE.parents[2] / "examples"
    outlook = read_outlook(examples / "ssl" / "fedhssl-moco.toml")
    found = make_suggestions(*lone_party(outlook, None), Network(1e7, 0.025))
    assert found.best.message_bytes < found.own[1] / 3
    assert 'exchange = "weights"' in found.toml


def test_trees_can_be_suggested_nothing() -> None:
    outlook = read_outlook(HERE.parents[2] / "examples" / "secureboost-breast-cancer.toml")
    party, rows = lone_party(outlook, None)
    first = party.recipe.model_copy(update={"phases": party.recipe.phases[:1]})
    party = with_course(party, Course(first))
    with raises(InputError, Code.CONFIG_INVALID, names="--suggest"):
        make_suggestions(party, rows, Network(1e7, 0.025))


def test_what_is_refused_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    party, rows = lone_party(outlook_of(recipe(), HERE), 10_000)
    _Piped(monkeypatch, refuses=8)
    found = make_suggestions(party, rows, Network(1e6, 0.05))
    assert [each.in_flight for each in found.tried] == [1, 2, 4]
    wide_console().print(found.render())
    shown = capsys.readouterr().out
    assert "Not tried: no 32 bits" in shown
    assert "To paste" in shown


# -- measured


def test_a_recipe_is_shortened_and_does_not_stop_early() -> None:
    short = shorten_phases(recipe(epochs=50, early_stopping={"patience": 2}))
    assert short.phases[0].settings["epochs"] == 2
    assert "early_stopping" not in short.phases[0].settings


def test_work_is_what_parties_do_one_after_the_other() -> None:
    def party(name: str, role: Any, **spent: float) -> PartySummary:
        times = [PhaseTimes(phase="splitnn", steps=10, **spent)]
        return PartySummary(name=name, role=role, pid=1, device="cpu", times=times)

    parties = [
        PartySummary(name="server", role="server", pid=1, device="cpu"),
        party("p0", "active", compute_s=0.2, encode_s=0.05, wait_s=9.0, decode_s=0.05, cpu_s=0.4),
        party("p1", "passive", compute_s=0.1, wait_s=5.0, cpu_s=0.2),
        party("p2", "passive", compute_s=0.1, decode_s=0.1, cpu_s=0.3),
    ]
    summary = Summary.model_construct(parties=parties)
    found = compute_batch_work(summary, "splitnn", 10)
    assert found is not None
    assert found.loop_s == pytest.approx(0.03 + 0.02)
    assert found.slowest_s == pytest.approx(0.03)
    assert found.total_s == pytest.approx(0.09)
    assert compute_batch_work(summary, "splitnn", 0) is None
    assert compute_batch_work(summary, "head", 10) is None


def test_a_few_steps_are_run_to_know_what_they_take() -> None:
    data = {"source": "sklearn:breast_cancer", "label": "target"}
    tables = cases.recipe(2) | {
        "phases": [{"kind": "splitnn", "epochs": 400, "batch_size": 64}, {"kind": "evaluate"}],
        "simulate": {"data": data},
    }
    network = measure_computation(
        outlook_of(Recipe.model_validate(tables), HERE), Network(1e7, 0.01)
    )
    assert set(network.work) == {"splitnn", "evaluate"}
    work = network.work["splitnn"]
    assert 0 < work.slowest_s < work.loop_s < 1.0
    assert work.slowest_s < work.total_s < 1.0
    with raises(InputError, Code.CONFIG_INVALID, names=("--measure", "--step-time")):
        measure_computation(outlook_of(recipe(), HERE), Network(1e7, 0.01))
