"""A lying active party asks a served model for ids that it invents: it learns nothing about the ids
that a passive party knows, beyond those that are answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

import vfl
from tests.harness.errors import raises
from tests.harness.online import store_of
from vfl_common.errors import Code, InputError
from vfl_common.rpc.serving.stream import EMBEDDED, NOT_ANSWERED, Step
from vfl_party.align.state import AlignmentFiles, CommonRows
from vfl_party.methods.secureboost.forest import SETTLED
from vfl_party.record.book import RecordBook, folder_of
from vfl_party.record.lines import write_people
from vfl_serve.answering import (
    DailyIdCounter,
    DailyLimit,
    IdFilter,
    Limit,
    SelectIds,
    SentBefore,
    daily_limit,
    read_aligned_ids,
    select_all_ids,
)
from vfl_serve.kinds import Answerer, make_answers
from vfl_serve.opening import MinimumRows
from vfl_serve.parties import combine_limits

ROWS, WIDTH = 40, 2
NUMBERS = np.random.default_rng(3)
X = NUMBERS.normal(size=(ROWS, 4))
IDS = [f"49151{number:07d}" for number in NUMBERS.choice(10**7, ROWS, replace=False)]
STRANGERS = [f"49152{number:07d}" for number in range(3000)]
MID = {"kind": "splitnn", "epochs": 2, "batch_size": 8, "mid": 0.001}
TREES: dict[str, Any] = {
    "kind": "secureboost",
    "trees": 2,
    "depth": 2,
    "bins": 8,
    "encryption": "none",
}


def recipe(phase: dict[str, Any], **more: Any) -> vfl.Recipe:
    return vfl.Recipe.from_dict(
        {
            "name": "guessed",
            "task": {"kind": "binary"},
            "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
            "model": {"embedding_size": WIDTH, "encoder": {"kind": "mlp", "hidden": [6]}},
            "phases": [phase],
            **more,
        }
    )


def tables(folder: Path, bank: slice = slice(None), shop: slice = slice(None)) -> dict[str, Any]:
    """Writes both tables, with some of the rows."""
    frame = pd.DataFrame({"id": IDS, **{f"x{at}": X[:, at] for at in range(4)}})
    left = frame[["id", "x0", "x1"]].assign(left=(X[:, 0] > 0).astype(int))
    left[bank].to_csv(folder / "bank.csv", index=False)
    frame[["id", "x2", "x3"]][shop].to_csv(folder / "shop.csv", index=False)
    return {
        "bank": vfl.Data(str(folder / "bank.csv"), id="id", label="left"),
        "shop": vfl.Data(str(folder / "shop.csv"), id="id"),
    }


@pytest.fixture(scope="module", params=["embeddings", "trees"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> vfl.Run:
    out = tmp_path_factory.mktemp("guessed")
    phase = MID if request.param == "embeddings" else TREES
    return vfl.simulate(recipe(phase), tables(out), out=out / "runs", quiet=True)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> vfl.Run:
    out = tmp_path_factory.mktemp("drawn")
    return vfl.simulate(recipe(MID), tables(out), out=out / "runs", quiet=True)


def answers(
    run: vfl.Run, folder: Path, limit: Limit | None = None, asked: SelectIds = select_all_ids
) -> Answerer:
    def sent() -> SentBefore:
        return SentBefore(folder / "sent.sqlite", "run")

    return make_answers(store_of(run.folder, "shop"), sent, limit, asked)


def states(shop: Answerer, *ids: str) -> list[int]:
    """Asks as the active party does; returns the state of each id."""
    until_s = time.monotonic() + 60.0
    if hasattr(shop, "_open_scorings"):
        # No id stands at a split of this party.
        nodes = bytes([SETTLED] * TREES["trees"] * len(ids))
        step = Step(bytes([0]) + nodes, time.monotonic_ns(), begins=True)
        return [*shop(list(ids), until_s, step).state]
    return [*shop(list(ids), until_s).state]


@pytest.fixture
def a_day(tmp_path: Path) -> Iterator[DailyIdCounter]:
    found = DailyIdCounter(tmp_path / "answers.sqlite", 2000)
    yield found
    found.close()


def test_a_refused_id_reads_as_an_unknown_one(run: vfl.Run, tmp_path: Path) -> None:
    daily = DailyLimit(tmp_path / "answers.sqlite", 2)
    shop = answers(run, tmp_path, combine_limits(None, [daily], []))
    for _ in range(2):
        assert states(shop, IDS[5], STRANGERS[0]) == [EMBEDDED, NOT_ANSWERED]
    assert states(shop, IDS[5], STRANGERS[0]) == [NOT_ANSWERED, NOT_ANSWERED]
    strict = answers(run, tmp_path, combine_limits(MinimumRows(8), [], []))
    assert states(strict, IDS[5], STRANGERS[0]) == [NOT_ANSWERED, NOT_ANSWERED]
    daily.close()


def test_an_id_that_a_limit_refuses_uses_up_no_other_limit(tmp_path: Path) -> None:
    """Else the next question would tell that the id is known."""

    class Grant:
        left = 3

        def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
            within, self.left = min(self.left, len(ids)), max(0, self.left - len(ids))
            return np.arange(len(ids)) < within

    daily = DailyLimit(tmp_path / "answers.sqlite", 1)
    left = []
    for known in (["victim"], []):
        # The others of the question are different people each time.
        others = [f"{known} {number}" for number in range(2)]
        grant = Grant()
        limit = combine_limits(MinimumRows(3), [daily], [grant])
        assert limit is not None
        if known:
            daily.take(known)
        limit.take([*known, *others])
        left.append(grant.left)
    assert left == [3, 3]
    daily.close()


def test_all_ids_are_counted_and_the_count_outlives_a_restart(
    run: vfl.Run, tmp_path: Path, a_day: DailyIdCounter
) -> None:
    said: list[str] = []
    shop = answers(run, tmp_path, asked=IdFilter(a_day, None, said.append))
    tried = [*STRANGERS[:1990], *IDS[:10], *STRANGERS[1990:], *IDS[10:]]
    found = []
    for begin in range(0, len(tried), 500):
        some = tried[begin : begin + 500]
        found += [i for i, s in zip(some, states(shop, *some), strict=True) if s == EMBEDDED]
    # All of the day's 2,000 ids, known or not, and none of the others.
    assert found == IDS[:10]
    (sentence,) = said
    assert sentence.startswith("serve.asked_a_day: 2,000 ids were asked for today")
    again = DailyIdCounter(tmp_path / "answers.sqlite", 2000)
    assert again.take(1) == 0
    again.close()


def test_a_share_of_the_limit_that_is_not_used_counts_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    first = DailyIdCounter(path, 200)
    assert first.take(1) == 1
    first.close()
    second = DailyIdCounter(path, 200)
    # The first program has counted two at once.
    assert second.take(1000) == 198
    second.close()


def test_the_day_s_limit_follows_the_table() -> None:
    assert [daily_limit(None, rows) for rows in (0, 400, 500_000)] == [10_000, 10_000, 1_000_000]
    assert daily_limit(7, 500_000) == 7


def test_mid_s_noise_cannot_be_averaged_away(drawn: vfl.Run, tmp_path: Path) -> None:
    """400 questions about one id, with other companions each time, also over a restart."""
    random, victim, bytes_ = np.random.default_rng(0), IDS[5], set[bytes]()
    others = [each for each in IDS if each != victim]
    for _ in range(2):
        shop = answers(drawn, tmp_path)
        for _ in range(200):
            companions = random.choice(others, 7, replace=False).tolist()
            place = int(random.integers(8))
            ids = [*companions[:place], victim, *companions[place:]]
            answer = shop(ids, time.monotonic() + 60.0)
            size = len(answer.embeddings) // len(ids)
            bytes_.add(answer.embeddings[place * size : (place + 1) * size])
        shop.close()
    assert len(bytes_) == 1
    # It is a draw, and not the mean.
    store = store_of(drawn.folder, "shop")
    found = store.held.look_up([victim], time.monotonic() + 60.0)
    mean = store.held.embed(found, found.rows, drawn=False).numpy()
    (sent,) = bytes_
    assert np.abs(np.frombuffer(sent, "<f4") - mean).max() > 0.01


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> vfl.Run:
    """A run of processes, whose record and folders are those of a real party."""
    out = tmp_path_factory.mktemp("aligned")
    data = tables(out, slice(30), slice(10, None))
    found = recipe(MID, rows={"align": "psi"})
    return vfl.simulate(found, data, out=out / "runs", quiet=True, processes=True)


def record_of(run: vfl.Run) -> Path:
    return folder_of(Path(run.folder) / "federation", "shop")


def test_only_ids_that_both_parties_know_are_answered(
    aligned: vfl.Run, tmp_path: Path, a_day: DailyIdCounter
) -> None:
    folder = Path(aligned.folder) / "shop"
    both = read_aligned_ids(folder, folder.parent.parent, record_of(aligned))
    shop = answers(aligned, tmp_path, asked=IdFilter(a_day, both, lambda _: None))
    want = [EMBEDDED if 10 <= at < 30 else NOT_ANSWERED for at in range(ROWS)]
    assert states(shop, *IDS, STRANGERS[0]) == [*want, NOT_ANSWERED]
    # The bank's own customer and the shop's own customer read alike.
    assert states(shop, IDS[0]) == states(shop, IDS[35]) == [NOT_ANSWERED]


def test_a_joint_prediction_adds_the_ids_that_it_has_aligned(
    aligned: vfl.Run, tmp_path: Path
) -> None:
    """Its folder names the run; what the record says of its table is of its own."""
    folder, record = Path(aligned.folder) / "shop", record_of(aligned)
    predicted = tmp_path / "20261128-120000-guessed-0000" / "shop"
    predicted.mkdir(parents=True)
    (predicted / "run.json").write_text(json.dumps({"trained_run": folder.parent.name}))
    new = ["new", "other"]
    AlignmentFiles(predicted, new, 1, []).finish(CommonRows(np.array([True, False]), b"", {}))
    before = read_aligned_ids(folder, tmp_path, record)
    assert [each in before for each in (IDS[15], "new", "other")] == [True, False, False]
    book = RecordBook(record, "shop")
    digest, rows = write_people(record, book.secret, new)
    book.add(people=digest, rows=rows, what="table", run=predicted.parent.name, generation=0)
    book.close()
    after = read_aligned_ids(folder, tmp_path, record)
    assert [each in after for each in (IDS[15], "new", "other")] == [True, True, False]


def test_without_a_known_alignment_nothing_is_served(run: vfl.Run, tmp_path: Path) -> None:
    with raises(InputError, Code.FILE_INVALID, names=("serve.ids", "shop")):
        read_aligned_ids(Path(run.folder) / "shop", tmp_path, tmp_path / ".record-shop")
