"""What `vfl forecast --suggest` and `--measure` find out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

import vfl_party.forecast.count
import vfl_party.methods
from tests.harness import cases
from vfl.forecasting import suggest
from vfl.forecasting.measure import measured, shortened, work_of
from vfl.forecasting.network import Network, Work
from vfl.forecasting.suggest import cost, suggestions, wire, with_settings
from vfl.report.table import wide_console
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import PartySummary, PhaseTimes, Summary
from vfl_party.declared import Traffic
from vfl_party.forecast.count import lone_party, outlook_of
from vfl_party.methods import load_method

HERE = Path(__file__).parent


def recipe(**training: Any) -> Recipe:
    phase = {"kind": "splitnn", "epochs": 3, "batch_size": 64} | training
    return Recipe.model_validate(cases.recipe(3) | {"phases": [phase, {"kind": "evaluate"}]})


def test_each_setting_has_its_sentence() -> None:
    assert cost(32, 1) == ""
    assert cost(32, 2) == "gradients are 1 update old"
    assert cost(4, 4) == "gradients are 3 updates old; values are rounded to 16 levels a row"
    assert cost(16, 1) == "values keep 11 bits"


def test_the_wire_is_said_as_a_recipe_says_it() -> None:
    assert wire(("a", "b"), 32) == []
    assert wire(("a",), 16) == [{"phase": "a", "codec": "float16"}]
    assert wire(("a", "b"), 4) == [{"phase": name, "codec": "bits", "bits": 4} for name in ("a", "b")]


def test_the_recipe_as_it_is_stays_what_it_is() -> None:
    given = recipe()
    assert with_settings(given, ("splitnn",), 32, 1) == given


class _Piped:
    """Split training that pretends to take ``in_flight``, and a wire that halves nothing but the recipe knows."""

    def __init__(self, patch: pytest.MonkeyPatch, refuses: int = 0) -> None:
        method = load_method("splitnn")
        stated, self.refuses, self.flights = method.traffic, refuses, 1
        assert stated is not None
        settings = create_model("Piped", __base__=method.settings, in_flight=(int, 1))

        def traffic(*args: Any) -> Traffic:
            return replace(stated(*args), in_flight=self.flights)

        self.method = replace(method, settings=settings, traffic=traffic)
        for module in (vfl_party.methods, vfl_party.forecast.count):
            patch.setattr(module, "load_method", lambda kind: self.method if kind == "splitnn" else load_method(kind))
        patch.setattr(suggest, "with_settings", self.changed)

    def changed(self, given: Recipe, _phases: tuple[str, ...], bits: int, in_flight: int) -> Recipe:
        if bits < 32 or (self.refuses and in_flight >= self.refuses):
            raise InputError(Code.CONFIG_INVALID, f"no {bits} bits")
        self.flights = in_flight
        return given


def test_the_mildest_of_the_soonest_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 50 ms of latency a step waits; sixteen in flight are as good as it gets here, and the bytes stay the same."""
    given = recipe(epochs=40)
    party, rows = lone_party(outlook_of(given, HERE), 1000)
    _Piped(monkeypatch)
    found = suggestions(party, rows, Network(1e9, 0.05))
    assert found.phases == ("splitnn",)
    assert [each.in_flight for each in found.tried] == [1, 2, 4, 8, 16]
    assert len({each.message_bytes for each in found.tried}) == 1
    times = [each.seconds for each in found.tried]
    assert times == sorted(times, reverse=True)
    assert found.best.seconds <= 1.1 * min(times)
    assert found.best.in_flight == 16 or found.best.seconds <= times[-1] * 1.1
    assert f"in_flight = {found.best.in_flight}" in found.toml
    assert len(found.refused) == 3  # 16, 8 and 4 bits, each once
    told = found.as_json()
    assert told["best"]["cost"].startswith("gradients are")
    assert len(told["tried"]) == 5


def test_a_link_that_holds_nothing_up_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    party, rows = lone_party(outlook_of(recipe(), HERE), 1000)
    _Piped(monkeypatch)
    found = suggestions(party, rows, Network(1e12, 0.0, any_work=Work(0.01, 0.01)))
    assert (found.best.bits, found.best.in_flight, found.toml) == (32, 1, "")
    wide_console().print(found.render())
    assert "The recipe is best as it is" in capsys.readouterr().out


def test_what_is_refused_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    party, rows = lone_party(outlook_of(recipe(), HERE), 1000)
    _Piped(monkeypatch, refuses=8)
    found = suggestions(party, rows, Network(1e6, 0.05))
    assert [each.in_flight for each in found.tried] == [1, 2, 4]
    wide_console().print(found.render())
    shown = capsys.readouterr().out
    assert "Not tried: no 32 bits" in shown
    assert "To paste" in shown


# -- measured -------------------------------------------------------------------------------------------------------


def test_a_recipe_is_shortened_and_does_not_stop_early() -> None:
    short = shortened(recipe(epochs=50, early_stopping={"patience": 2}))
    assert short.phases[0].settings["epochs"] == 2
    assert "early_stopping" not in short.phases[0].settings


def test_work_is_what_parties_do_one_after_the_other() -> None:
    def party(name: str, role: Any, **spent: float) -> PartySummary:
        times = [PhaseTimes(phase="splitnn", steps=10, **spent)]
        return PartySummary(name=name, role=role, pid=1, device="cpu", times=times)

    parties = [
        PartySummary(name="server", role="server", pid=1, device="cpu"),
        party("p0", "active", compute_s=0.2, encode_s=0.05, wait_s=9.0, decode_s=0.05),
        party("p1", "passive", compute_s=0.1, wait_s=5.0),
        party("p2", "passive", compute_s=0.1, decode_s=0.1),
    ]
    summary = Summary.model_construct(parties=parties)
    found = work_of(summary, "splitnn", 10)
    assert found is not None
    assert found.loop_s == pytest.approx(0.03 + 0.02)
    assert found.slowest_s == pytest.approx(0.03)
    assert work_of(summary, "splitnn", 0) is None
    assert work_of(summary, "head", 10) is None


def test_a_few_steps_are_run_to_know_what_they_take() -> None:
    data = {"source": "sklearn:breast_cancer", "label": "target"}
    tables = cases.recipe(2) | {
        "phases": [{"kind": "splitnn", "epochs": 400, "batch_size": 64}, {"kind": "evaluate"}],
        "simulate": {"data": data},
    }
    network = measured(outlook_of(Recipe.model_validate(tables), HERE), Network(1e7, 0.01))
    assert set(network.work) == {"splitnn", "evaluate"}
    assert 0 < network.work["splitnn"].slowest_s < network.work["splitnn"].loop_s < 1.0
    with pytest.raises(InputError, match=r"--measure runs .* steps of all parties, so it needs a recipe with"):
        measured(outlook_of(recipe(), HERE), Network(1e7, 0.01))
