"""A passive party that is killed, or frozen, does not stop the others: they take it back in the
same generation.

What comes of it equals a single process in which the same steps are computed without the party.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.harness import cases, reference
from tests.harness.errors import assert_names
from tests.harness.federation import RUN_S, Federation, Program
from tests.harness.proxy import Proxy
from tests.harness.waiting import wait_until
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.data import load_table
from vfl_party.data.rows import decode_division, division_of

EPOCHS, ROWS = 120, 200
DATA = cases.columns("sklearn:breast_cancer", 3, limit=ROWS)


def recipe(
    policy: str,
    rule: str,
    checkpoint_every: int = 5,
    sets: Mapping[str, Any] = MappingProxyType({}),
    **run: float,
) -> dict[str, Any]:
    return cases.recipe(
        3,
        task={"kind": "binary"},
        # No ReLU: when one is almost 0, rounding decides about its gradient, and parameters soon
        # differ by 1e-5.
        model={"combine": rule, "encoder": {"kind": "mlp", "hidden": [16], "activation": "tanh"}},
        phase={
            "epochs": EPOCHS,
            "batch_size": 32,
            "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9},
            "late_policy": policy,
            "deadline_s": 0.5,
            **sets,
        },
        # A stopped party is not lost on a busy machine.
        run={"checkpoint_every": checkpoint_every, "lost_after_s": 60.0} | run,
    )


def wait_for_round(federation: Federation, done: int) -> int:
    """Waits until p0 has done so many rounds; returns how many it has done."""

    def at() -> int:
        found = [*(federation.folder / "runs").glob("*/p0/metrics.jsonl")]
        rounds = found[0].read_text().count("\n") if found else 0
        assert rounds >= done or federation.programs["p0"].process.poll() is None, (
            federation.programs["p0"].stderr
        )
        return rounds

    return wait_until(at, lambda rounds: rounds >= done, RUN_S)


def wait_until_lenient(server: Program) -> None:
    """Waits until the server knows that a lost party ends no generation: p0 says so before its
    first metrics.
    """
    while not server.wait_for("progress")["metrics"]:
        pass


def wait_until_missed(federation: Federation, party: str) -> int:
    """Waits until p0 computes without ``party``; returns how many rounds it has done.

    On a busy machine p0 may be many rounds further when a signal reaches the party than when it was
    sent.
    """
    federation.programs["p0"].wait_for("away", party=party)
    return wait_for_round(federation, 0)


def missed(summary: dict[str, Any]) -> dict[str, set[tuple[int, int]]]:
    """{party: the steps (round, batch) that were computed without it}, from the summary's
    stretches.

    On a busy machine another party than the disturbed one may be late, too.
    """
    found: dict[str, set[tuple[int, int]]] = {}
    for each in summary["absences"]:
        found.setdefault(each["party"], set()).update(
            divmod(step, BATCHES) for step in stretch(each)
        )
    return found


def stretch(absence: dict[str, Any]) -> range:
    """The steps of one absence, counted through all rounds."""
    assert absence["phase"] == "splitnn"
    first = absence["first_round"] * BATCHES + absence["first_batch"]
    last = absence["last_round"] * BATCHES + absence["last_batch"]
    assert absence["steps"] == last - first + 1
    return range(first, last + 1)


def splits_of(tables: dict[str, Any]) -> dict[str, Any]:
    """The splits that the active party tells the others; empty if each draws them by itself."""
    table = load_table(DataSettings(**DATA["p0"]), with_label=True)
    division = division_of(Recipe.model_validate(tables), table)
    return decode_division(division) if division is not None else {}


def assert_as_if_computed_without(
    federation: Federation,
    tables: dict[str, Any],
    absent: dict[str, set[tuple[int, int]]],
    **behind: dict[str, tuple[int, int]],
) -> None:
    """``behind``: {party: ``saved`` and ``back`` of ``reference.Away``}, of parties that resumed
    behind the others.
    """
    away = {
        name: reference.Away(absent.get(name, ()), **behind.get(name, {}))
        for name in absent | behind
    }
    want = reference.train(tables, DATA, away, splits_of(tables))
    for name in federation.names:
        got = federation.parameters(name)
        for key, tensor in want[name].items():
            assert (got[key] - tensor).abs().max().item() <= 1e-6, (name, key)


# Of 160 training rows.
BATCHES = 5


@pytest.mark.parametrize(
    ("policy", "rule", "checkpoint_every", "sets"),
    # With 1000 it has no checkpoint when it is killed.
    [
        ("zeros", "sum", 5, {}),
        ("cached", "concat", 5, {}),
        ("skip", "attention", 5, {}),
        ("skip", "mean", 1000, {}),
        ("skip", "mean", 5, {"subsets": True}),
        ("skip", "concat", 5, {"party_dropout": 0.3}),
    ],
    ids=[
        "zeros-sum-5",
        "cached-concat-5",
        "skip-attention-5",
        "skip-mean-1000",
        "subsets",
        "party_dropout",
    ],
)
def test_a_party_is_killed_and_comes_back_in_the_same_generation(
    policy: str, rule: str, checkpoint_every: int, sets: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(policy, rule, checkpoint_every, sets)
    # p2 then knows its rows from its folder alone.
    if policy == "cached":
        tables["rows"]["split"] = "stratified"
    with Federation(tmp_path, tables, DATA) as federation:
        federation.start_all()
        server = federation.programs["server"]
        wait_for_round(federation, 5)
        wait_until_lenient(server)
        federation.programs["p2"].kill()
        assert server.wait_for("away")["party"] == "p2"
        # They go on.
        wait_for_round(federation, wait_until_missed(federation, "p2") + 10)
        # So that the run is not over before p2 is back.
        federation.programs["p0"].signal(signal.SIGSTOP)
        federation.start_party("p2").wait_for("started")
        assert server.wait_for("back")["party"] == "p2"
        federation.programs["p0"].signal(signal.SIGCONT)
        summary = federation.finish()
        assert summary["interruptions"] == 0
        absent = missed(summary)
        steps = absent["p2"]
        assert len(steps) > BATCHES
        # It was there at the end.
        assert max(steps) < (EPOCHS - 1, BATCHES - 1)
        assert_as_if_computed_without(federation, tables, absent, p2=death(federation, summary))
        rounds = (federation.run_folder / "p0" / "metrics.jsonl").read_text().splitlines()
        notes = [note for line in rounds if (note := json.loads(line).get("note"))]
        assert all("p2" in note for note in notes)
        assert_names(notes[0], "p2")
        told = [
            event["event"]
            for event in federation.programs["p0"].seen()
            if event.get("party") == "p2"
        ]
        assert told == ["away", "back"]


@pytest.mark.parametrize(
    ("align", "split"), [("digest", "random"), ("psi", "random"), ("psi", "stratified")]
)
def test_a_party_that_is_back_before_it_missed_a_step_is_in_the_summary(
    align: str, split: str, tmp_path: Path
) -> None:
    """It has lost its updates since its checkpoint, and the others have waited. Its rows are
    divided as before.
    """
    tables = recipe("cached", "concat", checkpoint_every=1000)
    tables["rows"] |= {"align": align, "split": split}
    tables["phases"][0]["deadline_s"] = 60.0
    with Federation(tmp_path, tables, DATA) as federation:
        federation.start_all()
        wait_for_round(federation, 5)
        wait_until_lenient(federation.programs["server"])
        federation.programs["p2"].kill()
        federation.start_party("p2")
        summary = federation.finish()
        assert (summary["interruptions"], summary["absences"]) == (0, [])
        lost = {
            party["name"]: (party["returns"], party["skipped_rounds"] > 4)
            for party in summary["parties"]
        }
        assert lost == {"server": (0, False), "p0": (0, False), "p1": (0, False), "p2": (1, True)}
        back = divmod(EPOCHS * BATCHES - last_round(federation, "p2")["steps"], BATCHES)
        assert_as_if_computed_without(federation, tables, {}, p2={"saved": (0, 0), "back": back})


def last_round(federation: Federation, party: str) -> dict[str, Any]:
    """What a party's log says of its last round."""
    log = (federation.run_folder / party / "log.jsonl").read_text().splitlines()
    found: dict[str, Any] = [line for line in map(json.loads, log) if line.get("event") == "round"][
        -1
    ]
    return found


def saved_by(federation: Federation, party: str = "p2") -> int:
    """The rounds that a party had done at the checkpoint from which it resumed; 0 if it had
    none.
    """
    log = map(json.loads, (federation.run_folder / party / "log.jsonl").read_text().splitlines())
    resumed = [line["message"] for line in log if line.get("event") == "resumed"]
    return int(*re.findall(r"\d+\.splitnn\.(\d+)", "".join(resumed)))


def death(federation: Federation, summary: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """``saved`` and ``back`` of p2, which came back in the same generation.

    It died in its longest absence: on a busy machine it may be late before that, and after it.

    It may have died after the first step since its checkpoint, and asks for that step again. It
    gets the same answer if nothing of the next step had come from it, and else hears that the step
    has passed. How many steps it has done tells which.
    """
    longest = max((stretch(each) for each in summary["absences"] if each["party"] == "p2"), key=len)
    saved, back = saved_by(federation), longest.stop
    last = last_round(federation, "p2")
    late = sum(step >= divmod(back, BATCHES) for step in missed(summary)["p2"])
    repeated = last["steps"] - (saved * BATCHES + last["rounds"] * BATCHES - back - late)
    assert repeated in (0, 1)
    if repeated:
        assert divmod(longest.start, BATCHES) == (saved, 1)
    return {"saved": (saved, repeated), "back": divmod(back, BATCHES)}


def test_a_server_that_is_started_again_takes_back_a_party_that_was_away(tmp_path: Path) -> None:
    tables = recipe("cached", "concat", server_absent_s=60.0)
    tables["phases"][0]["epochs"] = epochs = 200
    with Federation(tmp_path, tables, DATA) as federation:
        federation.start_all()
        wait_for_round(federation, 5)
        wait_until_lenient(federation.programs["server"])
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("away")
        active = federation.programs["p0"]
        wait_until_missed(federation, "p2")
        # So that the run is not over before all are back.
        active.signal(signal.SIGSTOP)
        federation.programs["server"].kill()
        server = federation.start_server(federation.address)
        active.signal(signal.SIGCONT)
        assert {server.wait_for("back")["party"], server.wait_for("back")["party"]} == {"p0", "p1"}
        wait_until_lenient(server)
        active.signal(signal.SIGSTOP)
        federation.start_party("p2").wait_for("started")
        assert server.wait_for("back")["party"] == "p2"
        active.signal(signal.SIGCONT)
        summary = federation.finish()
        assert (summary["interruptions"], summary["server_restarts"]) == (0, 1)
        absent = missed(summary)
        assert max(absent["p2"]) < (epochs - 1, BATCHES - 1)
        assert_as_if_computed_without(federation, tables, absent, p2=death(federation, summary))


def test_a_party_that_resumes_behind_the_others_says_what_it_lost(tmp_path: Path) -> None:
    tables = recipe("cached", "concat")
    with (
        Proxy() as proxy,
        Federation(tmp_path, tables, DATA, {"p1": {"active": proxy.address}}) as federation,
    ):
        # p1's, which is waited for: the run is not over before p2 is back.
        proxy.delay_s = 0.01
        federation.start_server()
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        federation.start_party("p1")
        federation.start_party("p2")
        wait_for_round(federation, 5)
        # Late first, as on a busy machine.
        federation.programs["p2"].signal(signal.SIGSTOP)
        wait_until_missed(federation, "p2")
        federation.programs["p2"].signal(signal.SIGCONT)
        federation.programs["p0"].wait_for("back", party="p2")
        wait_until_lenient(federation.programs["server"])
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("away")
        wait_for_round(federation, wait_for_round(federation, 0) + 20)
        federation.programs["server"].kill()
        proxy.delay_s = 0.0
        server = federation.start_server(federation.address)
        behind = federation.start_party("p2")
        resumed = int(server.wait_for("started")["checkpoint"].rpartition(".")[2])
        summary = federation.finish()
        assert (summary["interruptions"], summary["server_restarts"]) == (1, 1)
        skipped = {
            party["name"]: party["skipped_rounds"]
            for party in summary["parties"]
            if party["skipped_rounds"]
        }
        assert skipped["p2"] > 10
        (told,) = [event for event in behind.seen() if event["event"] == "skipped"]
        assert told["rounds"] == skipped["p2"]
        # p1, too, if it was interrupted between p0's checkpoint and its own: it lacks no more than
        # that one.
        assert {name: rounds for name, rounds in skipped.items() if name != "p2"} in ({}, {"p1": 5})
        begin = {name: saved_by(federation, name) for name in skipped}
        assert skipped == {name: resumed - saved for name, saved in begin.items()}
        lost = {name: {"saved": (saved, 0), "back": (resumed, 0)} for name, saved in begin.items()}
        assert_as_if_computed_without(federation, tables, missed(summary), **lost)


def test_a_party_that_is_frozen_for_a_while_misses_steps_and_counts_for_no_step_twice(
    tmp_path: Path,
) -> None:
    tables = recipe("cached", "concat")
    with Federation(tmp_path, tables, DATA) as federation:
        federation.start_all()
        wait_for_round(federation, 5)
        federation.programs["p2"].signal(signal.SIGSTOP)
        wait_for_round(federation, wait_until_missed(federation, "p2") + 10)
        federation.programs["p2"].signal(signal.SIGCONT)
        summary = federation.finish()
        assert summary["interruptions"] == 0
        absent = missed(summary)
        assert absent["p2"]
        assert_as_if_computed_without(federation, tables, absent)


def test_a_party_that_stays_away_is_waited_for_where_it_is_needed(tmp_path: Path) -> None:
    """In the evaluation, which tells what the model is worth with and without it; nobody repeats a
    round.
    """
    tables = recipe("skip", "mean")
    tables["phases"][0]["epochs"] = 60
    tables["phases"].append({"kind": "evaluate"})
    with Federation(tmp_path, tables, DATA) as federation:
        federation.start_all()
        server = federation.programs["server"]
        wait_for_round(federation, 10)
        wait_until_lenient(server)
        federation.programs["p2"].kill()
        server.wait_for("away")
        interrupted = server.wait_for("interrupted")
        server.wait_for("waiting", missing=["p2"])
        federation.start_party("p2")
        summary = federation.finish()
        assert summary["interruptions"] == 1, interrupted
        started = [event["checkpoint"] for event in server.seen() if event["event"] == "started"]
        assert started[-1] == "000060.splitnn.60"
        assert max(missed(summary)["p2"]) == (59, BATCHES - 1)
        assert {"test", "test without p1", "test without p2"} <= summary["metrics"].keys()
        kept = json.loads((federation.run_folder / "p2" / "run.json").read_text())
        assert kept["finished"]
