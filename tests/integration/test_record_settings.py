"""In every setting of ``splitnn`` and ``mocosfl``, a party's record and account tell of the people whose
numbers were in its messages, message by message.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from tests.harness import cases
from tests.harness.aligning import Direct
from tests.harness.memory import in_process
from tests.harness.recorded import recording
from tests.harness.reference_mocosfl import Client
from vfl_common.bundle import Bundle, StepKey
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryLink
from vfl_governance.account.store import standing
from vfl_governance.account.sums import tag_ids
from vfl_party.align import digest, rounds
from vfl_party.data import load_table
from vfl_party.outbound.exchange import to_tensors
from vfl_party.record.book import folder_of, secret_of
from vfl_party.record.history import RecordHistory
from vfl_party.record.lines import ALL

WIDTH, ROWS, CPU = 4, 45, torch.device("cpu")
NAMES = ("p0", "p1", "p2")
PHASES = ("splitnn", "mocosfl")


class Message(NamedTuple):
    """A bundle between two parties: its sender and receiver, its kind, and its place in the run."""

    sender: str
    receiver: str
    kind: str
    step: StepKey


# {(message, person): numbers about the person}.
Told = Counter[tuple[Message, str]]


class Numbered(nn.Module):
    """Embeds a row as its first column, so that a message says whose rows are in it."""

    def __init__(self, spec: Any, embedding_size: int) -> None:
        _ = spec
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(embedding_size))

    def forward(self, x_BF: Tensor) -> Tensor:
        return x_BF[:, :1] + 0.0 * self.scale


@pytest.fixture(autouse=True)
def numbered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A recipe can name the encoder, and an alignment takes no time."""
    module = ModuleType("numbered_rows")
    module.__dict__["Numbered"] = Numbered
    monkeypatch.setitem(sys.modules, "numbered_rows", module)
    monkeypatch.setattr(rounds, "Masking", Direct)
    monkeypatch.setitem(digest._SCRYPT, "n", 2)
    digest._compute_scrypt.cache_clear()
    yield
    digest._compute_scrypt.cache_clear()


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> dict[Message, dict[str, Tensor]]:
    """Every message of a phase between parties that has tensors, as it is sent."""
    found: dict[Message, dict[str, Tensor]] = {}
    send, reply = MemoryLink.send, ExchangeHub.reply

    def keep(sender: str, receiver: str, step: StepKey, bundle: Bundle) -> None:
        if bundle.tensors and step.phase in PHASES and "server" not in (sender, receiver):
            tensors = {name: x.clone() for name, x in to_tensors(bundle, CPU).items()}
            found[Message(sender, receiver, bundle.kind.label, step)] = tensors

    def sent(self: MemoryLink, step: StepKey, bundle: Bundle) -> None:
        keep(self._me, self._pipe.name, step, bundle)
        send(self, step, bundle)

    def replied(self: Any, step: StepKey, replies: dict[str, Bundle]) -> None:
        for party, bundle in replies.items():
            keep(self.pipe.name, party, step, bundle)
        reply(self, step, replies)

    monkeypatch.setattr(MemoryLink, "send", sent)
    monkeypatch.setattr(ExchangeHub, "reply", replied)
    return found


def recorded(folder: Path, name: str, people: list[str]) -> Told:
    """What the record of a party says about people."""
    history, found = RecordHistory(folder_of(folder, name)), Told()
    for person in people:
        for each in history.about([person], history.disclosures()):
            if each.way.phase not in PHASES:
                continue
            assert each.about != ALL, each
            step = StepKey(each.way.phase, each.round, each.batch)
            for to in each.to:
                if to != "server":
                    found[Message(name, to, each.way.kind, step), person] += each.of_person or 0
    return found


def account(folder: Path, name: str, people: list[str]) -> Counter[tuple[str, str]]:
    """{(peer, person): numbers about the person} of a party's account, without those of the
    alignment.
    """
    book, found = folder_of(folder, name), Counter[tuple[str, str]]()
    sums = standing(book).sums
    history = RecordHistory(book)
    for person in people:
        (at,) = sums.persons.numbers(tag_ids(secret_of(book), [person])).tolist()
        for peer in sums.peers:
            if at >= 0 and peer != "server":
                found[peer, person] += int(sums.vector(peer, "numbers_of_a_person")[at])
        for each in history.about([person], history.disclosures()):
            if each.way.phase not in PHASES:
                found.subtract({(to, person): each.of_person or 0 for to in each.to})
    return +found


def check(folder: Path, people: list[str], told: Told) -> None:
    """Compares record and account of every party with what its messages told."""
    for name in sorted({message.sender for message, _ in told} | {"p0"}):
        truth = Told({key: count for key, count in told.items() if key[0].sender == name})
        assert recorded(folder, name, people) == truth, name
        sums = Counter[tuple[str, str]]()
        for (message, person), count in truth.items():
            sums[message.receiver, person] += count
        assert account(folder, name, people) == sums, name


def person(number: int) -> str:
    return f"c{number:02d}"


def tables(folder: Path, *, partial: bool) -> dict[str, dict[str, Any]]:
    """Three parties' tables, of a column with the number of the row; ``partial``: each passive party
    has two thirds of the rows.
    """
    found: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(NAMES):
        rows = [row for row in range(ROWS) if not place or not partial or row % 3 != place]
        frame = pd.DataFrame({"id": [person(row) for row in rows], "x": np.array(rows, np.float32)})
        if not place:
            frame["y"] = [row % 2 for row in rows]
        frame.to_csv(folder / f"{name}.csv", index=False)
        label = {} if place else {"label": "y"}
        found[name] = {"source": str(folder / f"{name}.csv"), "id": "id", "scale": "none", **label}
    return found


def split(*, partial: bool, **phase: Any) -> dict[str, Any]:
    encoder = {"kind": "custom", "factory": "numbered_rows:Numbered"}
    model = {"embedding_size": WIDTH, "encoder": encoder, "combine": "mean"}
    small = {"optimizer": {"kind": "sgd", "lr": 1e-6}, "batch_size": 8, "epochs": 2}
    rows: dict[str, Any] = {"validation": 0.2, "test": 0.0}
    if partial:
        rows |= {"align": "psi", "partial": True}
    made = cases.recipe(3, task={"kind": "binary"}, model=model, rows=rows)
    return made | {"phases": [{"kind": "splitnn"} | small | phase]}


SPLIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"epochs": None, "steps": 7},
    "rounds of a step": {"checkpoint_steps": 1, "validate_every": 2},
    "in flight": {"in_flight": 3},
    "in flight, predicted weights": {"in_flight": 3, "predict_weights": True},
    "parts": {"micro_batches": 3},
    "parts in flight": {"micro_batches": 2, "in_flight": 2},
    "local updates": {"local_updates": 3},
    "cache": {"cache": {"batches": 2, "uses": 2}},
    "subsets": {"subsets": True},
    "party dropout": {"party_dropout": 0.4},
    "late policy": {"late_policy": "skip", "deadline_s": 60.0},
    "early stopping": {"early_stopping": {"patience": 1}},
    "bytes": {"max_bytes": 700},
}
LOCAL = ("late policy", "bytes", "local updates", "cache")
SPLIT_CASES = [(name, False) for name in SPLIT]
SPLIT_CASES += [(name, True) for name in SPLIT if name not in LOCAL]


@pytest.mark.parametrize(
    ("name", "partial"), SPLIT_CASES, ids=lambda each: each if isinstance(each, str) else str(each)
)
def test_splitnn(
    name: str, partial: bool, tmp_path: Path, messages: dict[Message, dict[str, Tensor]]
) -> None:
    phase = {"epochs": 2} | SPLIT[name]
    made = split(partial=partial, **phase)
    made["phases"] = [{key: value for key, value in made["phases"][0].items() if value is not None}]
    with recording(tmp_path):
        in_process(tmp_path / "run", made, tables(tmp_path, partial=partial))
    told = Told()
    rows: dict[tuple[str, StepKey], list[str]] = {}
    for message, tensors in messages.items():
        if message.kind == "embedding":
            numbers = tensors["z"][:, 0].round().int().tolist()
            rows[message.sender, message.step] = [person(each) for each in numbers]
    for message, tensors in messages.items():
        if message.kind == "verdict":
            continue
        passive = message.receiver if message.kind == "gradient" else message.sender
        people = rows[passive, message.step]
        (tensor,) = tensors.values()
        assert tensor.shape == (len(people), WIDTH), message
        told.update({(message, each): WIDTH for each in people})
    assert {message.kind for message, _ in told} == {"embedding", "gradient"}
    check(tmp_path, [person(row) for row in range(ROWS)], told)


MOCO: dict[str, dict[str, Any]] = {
    "plain": {},
    "as released": {"preset": "released"},
    "two averages an epoch": {"averages_per_epoch": 2},
    "frozen": {"frozen": True},
    "one of two drawn": {"sample": 0.5},
    "a memory for each": {"shared_memory": False},
    "a bottleneck": {"bottleneck": {"channels": 2, "stride": 2}},
    "a query that is a view": {"query": "view"},
}


@pytest.mark.parametrize("name", list(MOCO))
def test_mocosfl(name: str, tmp_path: Path, messages: dict[Message, dict[str, Tensor]]) -> None:
    """The rows of a batch are those of the one-process reference."""
    made, data = cases.own_rows_recipe(2, **{"epochs": 2} | MOCO[name]), cases.own_rows(2, 60)
    with recording(tmp_path):
        in_process(tmp_path / "run", made, data)
    recipe, told, everybody = Recipe.model_validate(made), Told(), set[str]()
    phase = made["phases"][0]
    averages = phase.get("averages_per_epoch", 1)
    clients = {
        each.name: Client(recipe, each.name, DataSettings(**data[each.name]), "mocosfl", phase)
        for each in recipe.passives
    }
    tables = {name: load_table(DataSettings(**data[name]), with_label=False) for name in clients}
    per = max(len(each.rows) for each in clients.values()) // phase["batch_size"]
    for message, tensors in messages.items():
        assert {len(each) for each in tensors.values()} == {phase["batch_size"]}, message
        if message.kind == "gradient":
            continue
        client, table = clients[message.sender], tables[message.sender]
        epoch, part = divmod(message.step.round, averages)
        client.steps = epoch * per + per * part // averages + message.step.batch
        numbers = sum(each.numel() for each in tensors.values()) // phase["batch_size"]
        told.update({(message, table.ids[row]): numbers for row in client.batch()})
        everybody.update(table.ids)
    assert told
    # The active party answers with numbers about the others' rows, and about none of its own.
    check(tmp_path, sorted(everybody), told)
