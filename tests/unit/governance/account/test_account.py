"""The account is the sum of all runs: of persons, of privacy, of killed runs; and holds limits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.rdp import RdpAccountant

from tests.harness.account_runs import WIDTH, Run, die, in_process
from tests.harness.errors import raises
from vfl_common.config.policy import AccountLimits
from vfl_common.errors import Code, InputError
from vfl_common.rpc.serving.stream import OutgoingMessage
from vfl_governance.account import sums as sums_of
from vfl_governance.account.limits import AccountGuard
from vfl_governance.account.store import FILE, Spent, standing, sum_spent, table
from vfl_party.base.mechanism import Mechanism
from vfl_party.privacy import accountant
from vfl_party.record.book import LINES
from vfl_party.record.history import RecordHistory, sum_disclosures
from vfl_party.record.recorder import ServingRecord

DELTA = 1e-5
NOISE, LABELS = Mechanism("gaussian", 4.0), Mechanism("laplace", 20.0, times=2)
STEP = Mechanism("gaussian", 1.2, 0.05)
IDS = [f"K-{number}" for number in range(12)]
# ``VFL_ACCOUNT_KILLS=200`` kills as many.
KILLS = int(os.environ.get("VFL_ACCOUNT_KILLS", "6"))


def of(folder: Path, peer: str = "p0", delta: float = DELTA) -> Spent:
    """The only data set at a peer."""
    (found,) = [each for each in sum_spent(standing(folder).sums, delta) if each.peer == peer]
    return found


def anew(folder: Path) -> list[Spent]:
    """The account that the record gives if there was none."""
    (folder / FILE).unlink(missing_ok=True)
    return [*sum_spent(standing(folder).sums, DELTA)]


def held(folder: Path, limits: AccountLimits) -> AccountGuard:
    return AccountGuard(standing(folder), limits, b"")


def event(mechanism: Mechanism) -> DpEvent:
    """The same mechanism, for dp-accounting."""
    one: DpEvent
    if mechanism.kind == "laplace":
        one = LaplaceDpEvent(mechanism.noise)
    elif mechanism.rate < 1:
        one = PoissonSampledDpEvent(mechanism.rate, GaussianDpEvent(mechanism.noise))
    else:
        one = GaussianDpEvent(mechanism.noise)
    return SelfComposedDpEvent(one, mechanism.times)


def theirs(uses: Counter[Mechanism], orders: list[float]) -> float:
    found = RdpAccountant(orders=orders)
    for mechanism, times in uses.items():
        found.compose(SelfComposedDpEvent(event(mechanism), times))
    return float(found.get_epsilon(DELTA))


def play(
    folder: Path,
    name: str,
    ids: list[str],
    sent: list[tuple[list[int], Mechanism]],
    steps: int,
    *,
    killed: bool,
) -> None:
    """Takes private steps, of which it takes half again as a resumed run does, and sends."""
    run = Run(folder, name, ids)
    for step in (*range(steps), *range(steps // 2, steps)):
        run.step(STEP, step + 1, f"keys of {name}")
    for rows, cost in sent:
        run.send(rows, cost=cost)
    if killed:
        die()
    run.close()


def test_ten_runs_of_which_two_are_killed_are_what_dp_accounting_composes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each person's uses are counted here by themselves. Of whole orders both are exact; at others
    dp-accounting takes an upper bound.
    """
    uses: dict[str, Counter[Mechanism]] = {person: Counter() for person in IDS}
    random_ = random.Random(7)  # noqa: S311 - of a test
    for number in range(10):
        ids = random_.sample(IDS, 8)
        messages = [sorted(random_.sample(range(8), 3)) for _ in range(6)]
        kinds = [random_.choice([NOISE, LABELS]) for _ in messages]
        steps, killed = random_.randrange(1, 40), number in (3, 8)
        if killed:
            # In the middle: the last bundle was written, and never sent.
            messages, kinds = messages[:4], kinds[:4]

        sent = [*zip(messages, kinds, strict=True)]
        work = partial(play, tmp_path, f"run-{number}", ids, sent, steps, killed=killed)
        status = in_process(work)
        assert os.WIFSIGNALED(status) if killed else status == 0, status
        for person in ids:
            uses[person][STEP] += steps
        for rows, kind in zip(messages, kinds, strict=True):
            uses_of = {ids[row] for row in rows}
            for person in uses_of:
                uses[person][kind] += 1
        # The account is opened between runs, or not.
        if number % 3 == 0:
            standing(tmp_path)
    orders: list[float] = [*range(2, 64)]
    all_orders = [*accountant.ORDERS]
    whole = max(theirs(each, orders) for each in uses.values())
    upper = max(theirs(each, all_orders) for each in uses.values())
    assert upper * 0.99 <= of(tmp_path).spent["epsilon"] <= upper * (1 + 1e-6)
    # Others get what is computed with the models, and no messages.
    least = max(
        theirs(Counter({STEP: each[STEP]}), all_orders) for each in uses.values() if each[STEP]
    )
    assert least * 0.99 <= of(tmp_path, "p2").spent["epsilon"] <= least * (1 + 1e-6)
    sums_of._epsilon.cache_clear()
    monkeypatch.setattr(accountant, "ORDERS", tuple(orders))
    monkeypatch.setattr(accountant, "MORE_ORDERS", tuple(orders))
    assert of(tmp_path).spent["epsilon"] == pytest.approx(whole, rel=1e-6)
    sums_of._epsilon.cache_clear()


def test_the_most_of_any_person_is_counted_and_not_a_mean(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", IDS)
    for rows in ([0, 1, 2], [2, 3], [2]):
        run.send(rows)
    run.send([2], to="p2", width=5)
    # Of nobody alone: weights.
    run.send(None, width=1000)
    run.close()
    found = of(tmp_path)
    assert found.spent["numbers_of_a_person"] == 3 * WIDTH
    assert found.spent["bytes_of_a_person"] == 3 * WIDTH * 4
    assert found.spent["bytes"] == (6 * WIDTH + 1000) * 4
    assert of(tmp_path, "p2").spent["numbers_of_a_person"] == 5
    assert (found.people, found.runs, found.uncovered) == (len(IDS), 1, 3 * WIDTH)


def test_the_same_people_are_one_account_whatever_their_table_is(tmp_path: Path) -> None:
    """Another order, some of them, and new ones: the same person has it all. Others do not."""
    for run, ids, row in (
        ("a", IDS, 3),
        ("b", [*reversed(IDS)], 8),
        ("c", [IDS[3], "new"], 0),
        ("d", ["x", "y"], 0),
    ):
        made = Run(tmp_path, run, ids)
        made.send([row])
        made.close()
    one, other = sum_spent(standing(tmp_path).sums, DELTA)
    assert (one.people, one.runs, one.spent["numbers_of_a_person"]) == (13, 3, 3 * WIDTH)
    assert (other.people, other.runs, other.spent["numbers_of_a_person"]) == (2, 1, WIDTH)
    # A table with people of both makes them one.
    made = Run(tmp_path, "e", ["x", IDS[3]])
    made.send([1])
    made.close()
    found = of(tmp_path)
    assert (found.people, found.runs) == (15, 5)
    assert found.spent["numbers_of_a_person"] == 4 * WIDTH
    assert found.spent["bytes"] == 5 * WIDTH * 4
    assert anew(tmp_path) == [found]


def test_alignments_predictions_and_bits_are_counted(tmp_path: Path) -> None:
    for generation in (1, 2):
        run = Run(tmp_path, "a", IDS, generation=generation)
        for _ in range(3):
            run.send(None, exchange="masked ids")
        run.send([0, 0, 1], exchange="partition", width=1)
        run.close()
    for name, rows in (("b", [0, 1, 2]), ("c", [2])):
        run = Run(tmp_path, name, IDS, job="predict")
        # Several exchanges about the same rows are one prediction.
        run.send(rows)
        run.send(rows)
        run.close()
    found = of(tmp_path).spent
    assert (found["alignments"], found["split_bits"]) == (2, 4)
    assert (found["predictions"], found["predictions_of_a_person"]) == (4, 2)


@pytest.mark.parametrize(
    ("key", "most", "sent"),
    [
        ("numbers_of_a_person", 2 * WIDTH, 2),
        ("bytes_of_a_person", 2 * WIDTH * 4 + 3, 2),
        ("bytes", 3 * WIDTH * 4 * 2, 3),
        ("split_bits", 1, 1),
        ("epsilon", 1.2, 1),
        ("predictions_of_a_person", 0, 0),
        ("predictions", 1, 0),
    ],
)
def test_what_would_pass_a_limit_does_not_leave(
    key: str, most: float, sent: int, tmp_path: Path
) -> None:
    cost = NOISE if key == "epsilon" else None
    job = "predict" if "predictions" in key else "train"
    exchange = "partition" if key == "split_bits" else "embedding"
    limits = AccountLimits.model_validate({key: most})
    first = Run(tmp_path, "before", ["somebody else"])
    first.send([0], cost=cost, width=100)
    first.close()
    guard = held(tmp_path, limits)
    run = Run(tmp_path, "a", IDS, job=job, allows=[guard])
    for _ in range(sent):
        run.send([0, 1], cost=cost, exchange=exchange)
    before = (tmp_path / LINES).read_text().count('"sent"')
    with raises(InputError, Code.REFUSED, names="p0") as error:
        run.send([1, 2], cost=cost, exchange=exchange)
    assert f"policy.account.{key} = " in str(error.value)
    assert "p0" not in error.value.public
    assert (tmp_path / LINES).read_text().count('"sent"') == before
    # Another peer has an account of its own.
    if sent:
        run.send([1, 2], cost=cost, exchange=exchange, to="p2")
    run.close()


@pytest.mark.parametrize(
    ("key", "most"),
    [("numbers_of_a_person", 2 * WIDTH), ("bytes", 5 * WIDTH * 4), ("epsilon", 1.7)],
)
def test_peers_that_may_collude_are_held_to_one_limit(
    key: str, most: float, tmp_path: Path
) -> None:
    """Two messages fit, whoever gets them."""
    cost = NOISE if key == "epsilon" else None
    limits = AccountLimits.model_validate({key: most, "together": True})
    for name in ("together", "alone"):
        Run(tmp_path / name, "before", IDS).close()
    guard = held(tmp_path / "together", limits)
    run = Run(tmp_path / "together", "a", IDS, allows=[guard])
    run.send([0, 1], cost=cost)
    run.send([0, 1], cost=cost, to="p2")
    for peer in ("p0", "p2", "p3"):
        with raises(InputError, Code.REFUSED):
            run.send([0, 1], cost=cost, to=peer)
    run.close()
    alone = AccountLimits.model_validate({key: most})
    run = Run(tmp_path / "alone", "a", IDS, allows=[held(tmp_path / "alone", alone)])
    for peer in ("p0", "p2", "p3"):
        run.send([0, 1], cost=cost, to=peer)
    run.close()


def test_a_private_step_that_would_pass_a_limit_is_not_taken(tmp_path: Path) -> None:
    most = accountant.compose([(STEP, 5)], DELTA)
    Run(tmp_path, "before", IDS).close()
    run = Run(tmp_path, "a", IDS, allows=[held(tmp_path, AccountLimits(epsilon=most))])
    for step in range(5):
        run.step(STEP, step + 1, "keys")
    # Again from a checkpoint: nothing is spent.
    run.step(STEP, 4, "keys")
    with raises(InputError, Code.REFUSED, names=("policy.account.epsilon", "p0")):
        run.step(STEP, 6, "keys")
    with raises(InputError, Code.REFUSED, names=("policy.account.epsilon", "p0")):
        run.step(STEP, 1, "other keys")
    run.close()


def test_what_another_program_sends_meanwhile_counts(tmp_path: Path) -> None:
    limits = AccountLimits(numbers_of_a_person=3 * WIDTH)
    one, other = (Run(tmp_path, run, IDS) for run in "ab")
    for run in (one, other):
        run.recorder._allows = [held(tmp_path, limits)]
    one.send([0])
    other.send([0])
    one.send([0])
    with raises(InputError, Code.REFUSED, names=("policy.account.numbers_of_a_person", "p0")):
        other.send([0])
    for run in (one, other):
        run.close()


def test_what_is_counted_as_it_is_written_is_what_the_record_gives(tmp_path: Path) -> None:
    """Questions of a served model, about people that are known or not, while another program
    writes.
    """
    chance = random.Random(3)  # noqa: S311 - of a test
    Run(tmp_path, "before", IDS).close()
    guard = held(tmp_path, AccountLimits(predictions=10**6))
    one, other = (
        Run(tmp_path, "served", (), job="serve", generation=0, allows=[guard]),
        Run(tmp_path, "other", IDS),
    )
    tells = ServingRecord(one.recorder, ("embedding", "up", "z", "chain", "", ""))
    for number in range(120):
        count, peer = chance.randrange(4), chance.choice(["p0", "p2"])
        ids = [f"K-{chance.randrange(2 * len(IDS))}" for _ in range(count)]
        times = [chance.randrange(1, 4) for _ in ids] if chance.random() < 0.3 else None
        data = bytes(4 * WIDTH * count)
        size = WIDTH * count, data, len(data), len(data) + 9
        place = chance.choice([0, 0, 1])
        assert guard.may_predict(ids, peer, "served").all()
        tells(OutgoingMessage(peer, "serve", "embedding", number, place, ids, times, *size))
        if chance.random() < 0.2:
            other.send([number % len(IDS)], to=peer)
        if chance.random() < 0.1:
            one.send([])
    for run in (one, other):
        run.close()
    guard._standing.catch_up()
    assert [*sum_spent(guard._standing.sums, DELTA)] == anew(tmp_path)


def test_kills_lose_nothing_that_was_spent(tmp_path: Path) -> None:
    """A program that sends and one that keeps the account are killed at any moment."""
    chance, said = random.Random(1), 0  # noqa: S311 - of a test
    Run(tmp_path, "first", IDS).close()
    for number in range(KILLS):
        reads, writes = os.pipe()
        sender, keeper = os.fork(), -1
        if sender == 0:
            run = Run(tmp_path, f"run-{number}", IDS)
            while True:
                run.send([number % len(IDS), 3])
                os.write(writes, b"x")
        os.close(writes)
        keeper = os.fork()
        if keeper == 0:
            while True:
                standing(tmp_path)
        first = os.read(reads, 1)
        time.sleep(chance.uniform(0.0, 0.02))
        for child in chance.sample([sender, keeper], 2):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        while more := os.read(reads, 1 << 16):
            first += more
        os.close(reads)
        said += len(first)
        # Each run may have written one more line than it said.
        found = of(tmp_path).spent["numbers_of_a_person"]
        assert said * WIDTH <= found <= (said + number + 1) * WIDTH * 2
    kept = [*sum_spent(standing(tmp_path).sums, DELTA)]
    assert kept == anew(tmp_path)


def test_programs_that_keep_the_account_at_once_wait_for_each_other(tmp_path: Path) -> None:
    Run(tmp_path, "first", IDS).close()
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run = Run(tmp_path, f"run-{number}", IDS)
                for _ in range(20):
                    run.send([3])
                    standing(tmp_path)
                run.close()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert of(tmp_path).spent["numbers_of_a_person"] == 4 * 20 * WIDTH
    assert [*sum_spent(standing(tmp_path).sums, DELTA)] == anew(tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_an_account_of_another_record_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", IDS)
    run.send([0])
    run.close()
    standing(tmp_path)
    whole = (tmp_path / LINES).read_bytes()
    (tmp_path / LINES).write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    with raises(InputError, Code.FILE_INVALID, names="account.sqlite"):
        standing(tmp_path)
    (tmp_path / LINES).write_bytes(whole)
    standing(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with raises(InputError, Code.FILE_INVALID, names="account.sqlite"):
        standing(tmp_path)
    with raises(InputError, Code.FILE_INVALID, names="record.folder"):
        standing(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE position SET lines = 'many'",
        "UPDATE position SET bytes = NULL",
        "DELETE FROM people",
        "UPDATE people SET tags = 'text'",
        "UPDATE of SET numbers = x'01'",
        "UPDATE of SET numbers = zeroblob(800)",
        "UPDATE of SET numbers = x'ffffffffffffff7f'",
        "UPDATE of SET what = 'cost nothing' WHERE what = 'bytes_of_a_person'",
        "UPDATE runs SET sums = '{}'",
        'UPDATE runs SET sums = \'{"number": 0, "job": "train", "person": 9}\'',
        "UPDATE known SET line = 'no JSON'",
        "INSERT INTO private VALUES ('r', 'p', 'k', 'many')",
    ],
)
def test_a_file_that_was_edited_is_refused_and_made_anew(change: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "r0", "abc")
    run.send([0, 1])
    run.close()
    standing(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as file, file:
        file.execute(change)
    with raises(InputError, Code.FILE_INVALID) as error:
        standing(tmp_path)
    assert "it is created again from the record" in str(error.value).replace("\n", " ")
    (tmp_path / FILE).unlink()
    assert of(tmp_path).spent["numbers_of_a_person"] == WIDTH


def test_a_record_that_was_edited_is_read_or_named(tmp_path: Path) -> None:
    """Whatever a value is replaced by, nothing but a sentence comes out."""
    run = Run(tmp_path, "r0", "abc")
    run.send([0, 1])
    run.step(Mechanism("gaussian", 2.0), 1, "keys")
    run.close()
    lines = [json.loads(line) for line in (tmp_path / LINES).read_bytes().splitlines()]
    values: tuple[object, ...] = (None, -1, 2**70, 1e300, "", "4:AAAA", [], [[1]], {}, float("nan"))
    named = 0
    for number, line in enumerate(lines):
        for key, value in itertools.product(line, values):
            changed = [*lines[:number], line | {key: value}, *lines[number + 1 :]]
            (tmp_path / LINES).write_text("".join(f"{json.dumps(each)}\n" for each in changed))
            (tmp_path / FILE).unlink(missing_ok=True)
            for read in (anew, lambda folder: sum_disclosures(RecordHistory(folder).disclosures())):
                try:
                    read(tmp_path)
                except InputError:
                    named += 1
    assert named > 100


def test_the_table_says_what_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path, "a", IDS)
    run.send([0, 1], cost=NOISE)
    run.send([0])
    run.step(Mechanism("gaussian", 0.0, 0.5), 1, "keys", to=("p2",))
    run.close()
    limits = AccountLimits(epsilon=3.0, numbers_of_a_person=10)
    lines = table(sum_spent(standing(tmp_path).sums, DELTA), limits)
    text = [" ".join(line.split()) for line in lines]
    assert any("p0 1" in line and "numbers a person 4 10 6" in line for line in text), lines
    assert any("p0" in line and "numbers a person, without privacy 2" in line for line in text)
    assert any("p2" in line and "ε at δ = 1e-05 ∞ 3 0" in line for line in text), lines


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gaussian",
        "gaussian x 1 1",
        "cauchy 1 1 1",
        "gaussian -1 1 1",
        "laplace 1 0.5 1",
        "gaussian 1e300 1 1",
    ],
)
def test_a_mechanism_is_read_as_it_was_written(text: str) -> None:
    with pytest.raises(ValueError):
        Mechanism.read(text)
    for each in (NOISE, LABELS, STEP, Mechanism("gaussian", np.pi / 3, 1 / 3)):
        assert Mechanism.read(each.text) == each
