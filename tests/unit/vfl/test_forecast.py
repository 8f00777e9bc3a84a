"""What a forecast is made of: batches, rounds, sizes, the network's time, and what it says where it
cannot know.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vfl_party.forecast.count
from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.federation import toml
from vfl.cli import cli
from vfl.forecasting import show
from vfl.forecasting.network import (
    AROUND_BYTES_SHARE,
    AROUND_MESSAGE_BYTES,
    BatchWork,
    Network,
    format_duration,
    format_rate,
    read_bandwidth,
    read_latency,
)
from vfl.forecasting.show import as_tables, make_notes, render
from vfl.summary.table import wide_console
from vfl_common.bundle import CONTROL
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import ByteCount, Bytes, LinkBytes
from vfl_party.assembly.trial import try_parties
from vfl_party.data.rows import divide_rows
from vfl_party.forecast.count import forecast, forecast_of, lone_party, outlook_of, read_rounds
from vfl_party.forecast.result import CountedForecast, StepRun, compare_with_ledger
from vfl_party.methods.splitnn.batches import Batches
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course, load_method
from vfl_party.phases.method import Method
from vfl_party.phases.rows import PartyData

HERE = Path(__file__).parent


def recipe(*phases: dict[str, Any], **splits: Any) -> Recipe:
    rows = {"validation": 0.1, "test": 0.2, **splits}
    return Recipe.model_validate(
        cases.recipe(3, model={"embedding_size": 8}, rows=rows) | {"phases": list(phases)}
    )


def of(
    *phases: dict[str, Any], rows: int = 1000, ended: dict[str, int] | None = None, **splits: Any
) -> CountedForecast:
    return forecast(outlook_of(recipe(*phases, **splits), HERE), rows, ended)


def payloads(found: CountedForecast, phase: str) -> dict[tuple[str, str, str], int]:
    return {
        (link.sender, link.receiver, link.kind): link.payload_bytes
        for link in found.links
        if link.phase == phase
    }


# -- what the methods state


def test_split_training_and_evaluation_are_counted() -> None:
    """700 training rows in batches of 64, 100 for validation, 200 for testing; two passive
    parties.
    """
    found = of({"kind": "splitnn", "epochs": 3, "batch_size": 64}, {"kind": "evaluate"})
    assert found.rows == 1000
    up, down = 3 * (700 + 100) * 8 * 4, 3 * 700 * 8 * 4
    want: dict[tuple[str, str, str], int] = {}
    for name in ("p1", "p2"):
        want |= {
            (name, "p0", "embedding"): up,
            ("p0", name, "gradient"): down,
            ("p0", name, "ack"): 0,
        }
    assert payloads(found, "splitnn") == want
    assert payloads(found, "evaluate")["p2", "p0", "embedding"] == 300 * 8 * 4
    assert [(phase.name, phase.round_trips) for phase in found.phases] == [
        ("open", 1),
        ("splitnn", 3 * (11 + 1)),
        ("evaluate", 2),
    ]
    assert not any(phase.at_most or phase.unknown for phase in found.phases)


def test_early_stopping_makes_it_an_upper_bound() -> None:
    phase = {"kind": "splitnn", "epochs": 10, "early_stopping": {"patience": 2}}
    most, known = of(phase), of(phase, ended={"splitnn": 4})
    assert [each.at_most for each in most.phases] == [False, True]
    assert [each.at_most for each in known.phases] == [False, False]
    # Batches, validation, verdict.
    assert known.phases[1].round_trips == 4 * (11 + 1 + 1)
    assert payloads(known, "splitnn")["p0", "p1", "verdict"] == 4
    assert most.phases[1].round_trips == 10 * (11 + 1 + 1)
    assert_names("\n".join(make_notes(most, Network(1e8, 0.02))), "--rounds", "--step-time")
    assert_names("\n".join(make_notes(known, Network(1e8, 0.02))), "--step-time", "--measure")


@pytest.mark.parametrize("ended", [{"splitnn": 2}, {"nothing": 2}])
def test_rounds_are_for_phases_that_may_end_early(ended: dict[str, int]) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="--rounds"):
        of({"kind": "splitnn", "epochs": 3}, ended=ended)


@pytest.mark.parametrize(
    "text", ["splitnn", "splitnn=", "=3", "splitnn=0", "splitnn=x", "splitnn=-1"]
)
def test_rounds_are_read(text: str) -> None:
    assert read_rounds(["a=3", "b-c=12"]) == {"a": 3, "b-c": 12}
    with raises(InputError, Code.CONFIG_INVALID, names=("--rounds", "20")):
        read_rounds([text])


def test_a_method_that_states_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(load_method("head")), "traffic", Method.traffic)
    found = of({"kind": "head", "epochs": 1, "name": "top"}, {"kind": "evaluate"})
    assert [each.unknown for each in found.phases] == [False, True, False]
    assert payloads(found, "top") == {}
    assert_names("\n".join(make_notes(found, Network(1e8, 0.02))), "--step-time", "--measure")


def test_who_is_alone_exchanges_nothing() -> None:
    found = of({"kind": "contrastive"}, {"kind": "fedonce"}, {"kind": "head", "epochs": 50})
    assert [each.round_trips for each in found.phases] == [1, 0, 0, 1]
    assert payloads(found, "head")["p1", "p0", "embedding"] == 700 * 8 * 4


def test_a_deadline_makes_the_acknowledgement_say_whether_it_was_met() -> None:
    head = {"kind": "head", "epochs": 1}
    assert payloads(of(head), "head")["p0", "p1", "ack"] == 0
    assert payloads(of(head | {"deadline_s": 5.0}), "head")["p0", "p1", "ack"] == 1


def test_a_party_alone_exchanges_nothing() -> None:
    tables = cases.recipe(1) | {"phases": [{"kind": "splitnn", "epochs": 3}, {"kind": "evaluate"}]}
    found = forecast(outlook_of(Recipe.model_validate(tables), HERE), 100)
    assert found.links == ()
    assert [each.round_trips for each in found.phases] == [0, 0, 0]


def test_fedhssl_without_data() -> None:
    """Projections of full batches are known from the recipe; weights that are averaged are not."""
    cross = {
        "kind": "fedhssl",
        "ssl": "simsiam",
        "local": False,
        "aggregate": False,
        "rounds": 2,
        "batch_size": 300,
    }
    found = of(cross | {"projector": [16, 24]})
    assert payloads(found, "fedhssl")["p0", "p1", "embedding"] == 2 * 2 * 300 * 24 * 4
    with raises(InputError, Code.CONFIG_INVALID, names="--rows"):
        of({"kind": "fedhssl", "ssl": "simsiam", "rounds": 2, "batch_size": 300})
    with raises(InputError, Code.CONFIG_INVALID, names=("batch_size", "p1")):
        of(cross | {"batch_size": 400}, aligned=0.5)


def test_what_nobody_knows_is_asked_for() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="--rows"):
        forecast(outlook_of(recipe({"kind": "evaluate"}), HERE))
    with raises(InputError, Code.CONFIG_INVALID, names=("40", "35")):
        of({"kind": "evaluate"}, rows=50, labelled=40)
    with raises(InputError, Code.CONFIG_INVALID):
        of({"kind": "splitnn", "epochs": 1}, rows=1, test=0.89)


@pytest.mark.parametrize(
    "phase",
    [
        {"kind": "fedhssl", "ssl": "moco", "batch_size": 20, "queue": 4096},
        {
            "kind": "head",
            "epochs": 1,
            "own_encoder": "trained",
            "dp": {"noise_multiplier": 1.0, "delta": 0.5},
        },
    ],
    ids=["queue", "privacy"],
)
def test_what_a_party_would_refuse_is_refused_with_its_sentence(phase: dict[str, Any]) -> None:
    data = {"source": "sklearn:breast_cancer", "label": "target", "limit": 100}
    tables = cases.recipe(3, model={"embedding_size": 16}) | {
        "phases": [phase],
        "simulate": {"data": data},
    }
    outlook = outlook_of(Recipe.model_validate(tables), HERE)
    with pytest.raises(InputError) as joining:
        try_parties(outlook.recipe, HERE)
    with raises(InputError, Code.CONFIG_INVALID, names="80") as told:
        forecast(outlook)
    assert str(told.value) == str(joining.value)


def test_phases_that_do_not_fit_together_are_refused_without_data() -> None:
    made = recipe({"kind": "mocosfl", "epochs": 1, "batch_size": 16, "image": [1, 8, 8], "cut": 1})
    for rows in (None, 1000):
        with raises(InputError, Code.CONFIG_INVALID, names=("mocosfl", "rows.align")):
            forecast(outlook_of(made, HERE), rows)


def test_an_error_in_the_recipe_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(toml(cases.recipe(2) | {"phases": [{"kind": "gbdt"}, {"kind": "evaluate"}]}))
    with raises(InputError, Code.CONFIG_INVALID, names=("gbdt", "r.toml")):
        show.count_forecast(path, rows=100)


def test_a_billion_steps_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vfl_party.forecast.count, "MAX_STEPS", 3 * 12)
    assert of({"kind": "splitnn", "epochs": 3}).phases[1].round_trips == 3 * 12
    with raises(InputError, Code.CONFIG_INVALID, names="36"):
        of({"kind": "splitnn", "epochs": 10**9})


@given(
    rows=st.integers(3, 400),
    size=st.integers(1, 70),
    epochs=st.integers(1, 5),
    every=st.integers(1, 3),
    most=st.none() | st.integers(1, 40_000),
    stride=st.integers(1, 30),
)
def test_sizes_are_those_of_the_batches(
    rows: int, size: int, epochs: int, every: int, most: int | None, stride: int
) -> None:
    given_ = recipe({"kind": "evaluate"})
    party = Party(
        "p1", Course(given_), torch.device("cpu"), {}, PartyData(divide_rows(given_, rows))
    )
    settings = SplitNNSettings(
        epochs=epochs,
        batch_size=size,
        validate_every=every,
        max_bytes=most,
        checkpoint_steps=stride,
    )
    batches = Batches(party, "splitnn", settings)
    steps = [batches.of(round_) for round_ in range(batches.rounds)]
    whole = [[len(batch) for batch, _ in each] for each in steps]
    assert [batches.sizes(round_) for round_ in range(batches.rounds)] == whole
    sent = [2 * 4 * 8 * 2 * count for each in whole for count in each]
    if most is not None:
        assert sum(sent[:-1]) < most
        assert sum(sent) >= most or sum(last for each in steps for _, last in each) == epochs

    # Shorter rounds are the same steps, and validation comes after the same of them.
    long = Batches(party, "splitnn", settings.model_copy(update={"checkpoint_steps": 10**6}))
    flat = [(batch.tolist(), last) for each in steps for batch, last in each]
    assert flat == [
        (batch.tolist(), last) for round_ in range(long.rounds) for batch, last in long.of(round_)
    ]
    assert all(0 < len(each) <= stride for each in steps)
    ends = list(accumulate(map(len, whole)))
    assert [end for round_, end in enumerate(ends) if batches.validates(round_)] == list(
        accumulate(len(long.of(round_)) for round_ in range(long.rounds))
    )
    for round_, end in enumerate(ends):
        begin = end - len(whole[round_])
        assert batches.epochs_before(round_) == sum(last for _, last in flat[:begin])
        assert batches.validations(round_) == sum(map(batches.validates, range(round_)))


# -- time


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100Mbit/s", 100e6),
        ("10Mbit", 10e6),
        ("1Gbit", 1e9),
        ("1.5 Gbps", 1.5e9),
        ("100MB", 800e6),
        ("12.5MB/s", 100e6),
        ("56kbit/s", 56e3),
        ("64kb", 64e3),
        ("9600bit/s", 9600.0),
        ("3MBps", 24e6),
        ("2 mbytes/s", 16e6),
        (".5tbit", 5e11),
    ],
)
def test_bandwidth_is_read(text: str, bits: float) -> None:
    assert read_bandwidth(text) == pytest.approx(bits)


@pytest.mark.parametrize(
    "text",
    ["", "100", "fast", "-1Mbit", "0Mbit", "1e3Mbit", "10 Mbit per s", "nan", "10MiB", "5Mbit/h"],
)
def test_bandwidth_without_a_sense_is_refused(text: str) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="--bandwidth"):
        read_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value_s"),
    [("20ms", 0.02), ("0.1s", 0.1), ("500us", 5e-4), ("2 µs", 2e-6), ("0", 0.0)],
)
def test_latency_is_read(text: str, value_s: float) -> None:
    assert read_latency(text) == pytest.approx(value_s)


@pytest.mark.parametrize("text", ["", "20", "-1ms", "2h", "4000s", "ms"])
def test_latency_without_a_sense_is_refused(text: str) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="--latency"):
        read_latency(text)


def test_time_is_round_trips_and_bytes() -> None:
    network = Network.read("8Mbit/s", "50ms")
    told = as_tables(
        of({"kind": "splitnn", "epochs": 3, "batch_size": 64}, {"kind": "evaluate"}), network
    )
    # Two passive parties; the rows' digests.
    payload = 2 * 8 * 4 * (3 * (700 + 100) + 3 * 700 + 300) + 2 * (8 + 32)
    assert told["total"]["payload_bytes"] == payload
    assert payload < told["total"]["message_bytes"] < 1.06 * payload
    trips = 1 + 3 * (11 + 1) + 2
    around = (
        AROUND_BYTES_SHARE * told["total"]["message_bytes"]
        + AROUND_MESSAGE_BYTES * told["total"]["messages"]
    )
    over_s = (told["total"]["message_bytes"] + around) / 1_000_000
    assert told["total"]["seconds"] == pytest.approx(0.1 * trips + over_s)
    slower = as_tables(
        of({"kind": "splitnn", "epochs": 3, "batch_size": 64}),
        Network.read("8Mbit/s", "50ms", "3ms"),
    )
    bare = as_tables(of({"kind": "splitnn", "epochs": 3, "batch_size": 64}), network)
    # Steps that train.
    assert slower["total"]["seconds"] == pytest.approx(bare["total"]["seconds"] + 0.003 * 3 * 11)


def closed_loop(
    batches: int,
    in_flight: int,
    parts: int,
    latency_s: float,
    up_s: float,
    down_s: float,
    work_s: float,
) -> float:
    """Steps as events: up, latency, work, down, latency; each place serves one after the other.

    Of the batches, each in so many parts, D are under way: a batch begins when the D-th before it
    is done.
    """
    up_free = work_free = down_free = 0.0
    done: list[float] = []
    for step in range(batches * parts):
        before = (step // parts - in_flight + 1) * parts - 1
        begin = done[before] if before >= 0 else 0.0
        up_free = max(up_free, begin) + up_s
        work_free = max(work_free, up_free + latency_s) + work_s
        down_free = max(down_free, work_free) + down_s
        done.append(down_free + latency_s)
    return done[-1]


@given(
    batches=st.integers(1, 60),
    in_flight=st.integers(1, 16),
    parts=st.integers(1, 5),
    latency_s=st.floats(0, 0.1),
    up_bytes=st.integers(1, 200_000),
    down_bytes=st.integers(1, 200_000),
    work_s=st.floats(0, 0.05),
)
def test_time_of_steps_in_flight_is_that_of_their_events(
    batches: int,
    in_flight: int,
    parts: int,
    latency_s: float,
    up_bytes: int,
    down_bytes: int,
    work_s: float,
) -> None:
    network, steps = (
        Network(8e6, latency_s, any_work=BatchWork(parts * work_s, parts * work_s)),
        batches * parts,
    )
    run = StepRun(
        exchange="embedding",
        trains=True,
        times=1,
        steps=steps,
        in_flight=in_flight * parts,
        parts=parts,
        up_bytes=steps * up_bytes,
        down_bytes=steps * down_bytes,
        up_messages=0,
        down_messages=0,
    )
    up_s, down_s = network.over_s(up_bytes, 0), network.over_s(down_bytes, 0)
    want_s = closed_loop(batches, in_flight, parts, latency_s, up_s, down_s, work_s)
    assert network.run_s("splitnn", run) == pytest.approx(want_s, rel=1e-6)
    assert network.seconds("splitnn", [run, run.model_copy(update={"times": 3})]) == pytest.approx(
        4 * want_s
    )


def test_work_of_a_phase_goes_before_that_of_all() -> None:
    found = of({"kind": "splitnn", "epochs": 2, "batch_size": 64})
    phase = found.phases[1]
    plain = Network(1e6, 0.01)
    measured = replace(plain, work={"splitnn": BatchWork(0.5, 0.25)}, any_work=BatchWork(9.0, 9.0))
    steps = sum(run.times * run.steps for run in phase.runs if run.trains)
    assert steps == 2 * 11
    assert measured.seconds(phase.name, phase.runs) == pytest.approx(
        plain.seconds(phase.name, phase.runs) + 0.5 * steps
    )


def test_parties_on_one_machine_share_its_cores() -> None:
    run = StepRun(
        exchange="embedding",
        trains=True,
        times=1,
        steps=101,
        in_flight=4,
        parts=1,
        up_bytes=101,
        down_bytes=101,
        up_messages=0,
        down_messages=0,
    )
    own = Network(1e12, 0.001, any_work=BatchWork(0.010, 0.006, 0.024))
    # The slowest party's 6 ms.
    assert own.run_s("splitnn", run) == pytest.approx(0.012 + 100 * 0.006, rel=1e-3)
    assert replace(own, cores=4).run_s("splitnn", run) == pytest.approx(own.run_s("splitnn", run))
    assert replace(own, cores=2).run_s("splitnn", run) == pytest.approx(101 * 0.012, rel=1e-3)
    alone = run.model_copy(update={"in_flight": 1})
    assert replace(own, cores=2).run_s("splitnn", alone) == pytest.approx(101 * 0.012, rel=1e-3)
    # Not all at once.
    assert replace(own, cores=1).run_s("splitnn", alone) == pytest.approx(101 * 0.024, rel=1e-3)
    said = make_notes(
        of({"kind": "splitnn", "epochs": 2, "batch_size": 64}),
        replace(own, cores=2, work={"splitnn": own.any_work}),
    )
    assert (
        "Computation, measured here in one process, a step: splitnn 10 ms; all parties share 2 cores."
        in said
    )
    with raises(InputError, Code.CONFIG_INVALID, names=("--cores", "--measure")):
        cli.main(["forecast", "recipe.toml", "--cores", "2"], standalone_mode=False)


def test_steps_in_flight_of_a_phase_are_those_of_its_training() -> None:
    """Two epochs of 11 batches; validation waits for each answer."""
    party, rows = lone_party(
        outlook_of(recipe({"kind": "splitnn", "epochs": 2, "batch_size": 64}), HERE), 1000
    )
    kind = type(load_method("splitnn"))
    stated: Any = kind.traffic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "traffic", lambda *args: replace(stated(*args), in_flight=4))
        found = forecast_of(party, rows)
    runs = {(run.exchange, run.trains): (run.steps, run.in_flight) for run in found.phases[1].runs}
    assert runs == {("embedding", True): (11, 4), ("validation", False): (1, 1)}
    assert found.phases[1].round_trips == 2 * 12


def test_a_step_time_without_a_sense_is_refused() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="--step-time"):
        Network.read("1Mbit", "1ms", "fast")


def test_brackets_reach_the_terminal_without_backslashes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide_console().print(render(of({"kind": "splitnn", "epochs": 1}), Network(1e6, 0.01)))
    shown = capsys.readouterr().out
    assert "[rows," in shown
    assert "\\" not in shown


def test_numbers_for_people() -> None:
    assert [format_rate(bits) for bits in (1e9, 100e6, 56e3, 300)] == [
        "1 Gbit/s",
        "100 Mbit/s",
        "56 kbit/s",
        "300 bit/s",
    ]
    assert [format_duration(s) for s in (0.35, 421.3, 720, 12600)] == [
        "0.35 s",
        "421 s",
        "12 min",
        "3.5 h",
    ]


# -- against the ledger


def counted(*links: LinkBytes) -> Bytes:
    return Bytes(total=ByteCount(), by_phase={}, by_link=list(links), tcp=[], agrees=True)


def test_what_was_not_forecast_is_an_error_too() -> None:
    found = of({"kind": "evaluate"})
    assert all(each.ratio == 0 for each in compare_with_ledger(found, counted(*found.links)))
    more = found.links[0].model_copy(update={"message_bytes": 2 * found.links[0].message_bytes})
    assert (
        min(each.ratio for each in compare_with_ledger(found, counted(more, *found.links[1:])))
        < -0.2
    )
    missing = compare_with_ledger(
        found, counted(*(link for link in found.links if link.phase != "evaluate"))
    )
    assert {each.phase: each.ratio for each in missing} == {"open": 0.0, "evaluate": float("inf")}
    session = found.links[0].model_copy(update={"phase": CONTROL, "receiver": "server"})
    assert all(
        each.ratio == 0 for each in compare_with_ledger(found, counted(session, *found.links))
    )
    unforeseen = found.links[0].model_copy(update={"phase": "more"})
    assert -1.0 in [
        each.ratio for each in compare_with_ledger(found, counted(unforeseen, *found.links))
    ]
