"""Messages that a run declares to carry no label information are the same bytes whatever the labels.

Each recipe runs twice in one process, the second time with the labels permuted among the rows. Of
an exchange that is declared free of labels, every byte that the active party sends must be equal.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import cases
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import Summary, describe_label_exposure
from vfl_party.assembly.trial import try_party
from vfl_party.data import Table
from vfl_party.data.load import load_table
from vfl_party.outbound.chain import Chain
from vfl_party.outbound.filter import NOWHERE, Passage, Tensors
from vfl_party.runtime import progress
from vfl_server.in_process import LocalSession

HEAD: dict[str, Any] = {"kind": "head", "epochs": 2, "batch_size": 24}
EVALUATE: dict[str, Any] = {"kind": "evaluate"}
FEDHSSL: dict[str, Any] = {
    "kind": "fedhssl",
    "rounds": 2,
    "batch_size": 16,
    "ssl": "simsiam",
    "projector": [8, 8, 8],
    "predictor": 8,
}
SPLITNN: dict[str, Any] = {"kind": "splitnn", "epochs": 2, "batch_size": 24}
TREES: dict[str, Any] = {"kind": "secureboost", "trees": 2, "encryption": "none"}
FEDCVT: dict[str, Any] = {
    "kind": "fedcvt",
    "epochs": 1,
    "unlabelled_batch_size": 0,
    "own_batch_size": 8,
}


def fedonce(objective: str) -> dict[str, Any]:
    trained = {} if objective == "pca" else {"epochs": 2, "batch_size": 20}
    return {"kind": "fedonce", "objective": objective, **trained}


# Recipes in which nothing that leaves the active party before evaluation depends on labels.
FREE: dict[str, list[dict[str, Any]]] = {
    "fedonce nat": [fedonce("nat"), {**HEAD, "own_encoder": "trained"}],
    "fedonce pca": [fedonce("pca"), {**HEAD, "deadline_s": 600.0}],
    "fedonce reconstruction": [fedonce("reconstruction"), HEAD],
    "fedonce contrastive": [fedonce("contrastive"), HEAD],
    "ss-vfl": [{"kind": "contrastive", "rounds": 2, "batch_size": 16, "ssl": "simclr"}, HEAD],
    "fedhssl": [{**FEDHSSL, "cross": True, "local": True, "aggregate": True}, HEAD],
    "fedgssl": [{**FEDHSSL, "cross": True, "local": True, "aggregate": False}, HEAD],
    "head alone": [HEAD],
    "fedonce pca + head gbdt": [fedonce("pca"), {"kind": "head"}],
    "fedonce pca + head gbdt, early stopping": [fedonce("pca"), {"kind": "head"}],
}
# Of some of them; otherwise a linear layer.
TOPS: dict[str, dict[str, Any]] = {
    "fedonce pca + head gbdt": {"kind": "gbdt", "trees": 5, "min_rows": 5},
    "fedonce pca + head gbdt, early stopping": {
        "kind": "gbdt",
        "trees": 20,
        "min_rows": 5,
        "early_stopping": 2,
    },
}
# Recipes that tell the others something of labels.
TELLING: dict[str, list[dict[str, Any]]] = {
    "splitnn": [SPLITNN],
    "early stopping": [{**SPLITNN, "early_stopping": {"patience": 1}}],
    "fedcvt": [FEDCVT],
    "secureboost": [TREES],
    "head, then splitnn": [HEAD, SPLITNN],
    "splitnn, then fedhssl": [
        SPLITNN,
        {**FEDHSSL, "cross": False, "local": True, "aggregate": True},
    ],
}


@dataclass
class Sent:
    """The digests of what the active party sends: {(phase, number of message): SHA-256}, and to the server."""

    messages: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    control: list[bytes] = field(default_factory=list)
    summary: Summary | None = None


def sent(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Recipe,
    data: dict[str, dict[str, Any]],
    *,
    permuted: bool = False,
    labels: Mapping[str, Any] | None = None,
) -> Sent:
    """Runs a recipe, and returns what its active party has sent. ``permuted``: with other labels
    for its rows. ``labels``: {id: the label}, in place of the table's.
    """
    found, active = Sent(), made.active.name
    apply, say = Chain.apply, LocalSession._say

    def applied(self: Chain, tensors: Tensors, at: Passage = NOWHERE) -> Tensors:
        leaves = apply(self, tensors, at)
        # An alignment knows no names of senders; passive parties send to the active party alone.
        if at.sender == active or (not at.sender and at.receiver != active):
            digest = hashlib.sha256(repr((at, sorted(leaves))).encode())
            for name in sorted(leaves):
                digest.update(leaves[name].detach().cpu().numpy().tobytes())
            found.messages[at.step.phase].append(digest.hexdigest())
        return leaves

    def said(self: LocalSession, message: Any) -> None:
        kind = message.WhichOneof("body")
        # Progress within a round is told now and then, by the clock.
        if self.me == active and (kind in ("plan", "alone") or message.progress.rounds):
            copy = type(message)()
            copy.CopyFrom(message)
            # Metrics are aggregates of labels, and are declared as such.
            copy.progress.ClearField("metrics")
            if not copy.progress.batches:
                found.control.append(copy.SerializeToString(deterministic=True))
        say(self, message)

    def load(settings: DataSettings, with_label: bool) -> Table:
        table = load_table(settings, with_label=with_label)
        if table.labels is not None and labels is not None:
            return replace(table, labels=np.array([labels[id_] for id_ in table.ids]))
        if table.labels is None or not permuted:
            return table
        order = np.random.default_rng(3).permutation(len(table.labels))
        return replace(table, labels=table.labels[order])

    tables = {name: parse(DataSettings, each, "data") for name, each in data.items()}
    with monkeypatch.context() as patch:
        patch.setattr(Chain, "apply", applied)
        patch.setattr(LocalSession, "_say", said)
        # Otherwise the clock decides which rounds are reported.
        patch.setattr(progress, "_REPORT_S", 0.0)
        found.summary = run_in_process(made, tables, folder, load=load)
    return found


def twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, made: Recipe, data: dict[str, dict[str, Any]]
) -> tuple[Sent, Sent]:
    first, second = (
        sent(folder / name, monkeypatch, made, data, permuted=name == "permuted")
        for name in ("as they are", "permuted")
    )
    assert first.summary is not None
    assert second.summary is not None
    assert first.summary.metrics != second.summary.metrics, "the labels were not permuted"
    return first, second


def recipe(
    phases: list[dict[str, Any]],
    task: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **rows: Any,
) -> Recipe:
    made = cases.recipe(2, task=task, model=model, rows=rows)
    evaluate = [] if phases[-1]["kind"] == "secureboost" else [EVALUATE]
    return parse(Recipe, {**made, "phases": [*phases, *evaluate]}, "recipe")


def of_active(summary: Summary) -> dict[str, set[str]]:
    """Returns {phase: what is declared of the messages of the active party}."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in summary.exchanges:
        if each.labels:
            found[each.phase].add(each.labels)
    return found


def assert_free(first: Sent, second: Sent) -> None:
    """Asserts that two runs with other labels sent the same, and declared it."""
    assert first.messages == second.messages
    assert first.control == second.control
    assert first.control
    assert first.summary is not None
    declared = of_active(first.summary)
    assert set().union(*declared.values()) <= {"none"}
    assert set(declared) <= set(first.messages)


@pytest.mark.parametrize("name", FREE)
def test_nothing_before_evaluation_depends_on_labels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(FREE[name], model={"top": TOPS[name]} if name in TOPS else None)
    first, second = twice(tmp_path, monkeypatch, made, cases.digits(2))
    assert_free(first, second)


@pytest.mark.parametrize("name", TELLING)
def test_what_is_declared_free_of_labels_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(TELLING[name], aligned=0.8 if name == "fedcvt" else 1.0)
    data = cases.digits(2)
    if name == "secureboost":
        made = recipe(TELLING[name], task={"kind": "binary"})
        data = cases.columns("sklearn:breast_cancer", 2, limit=100)
    first, second = twice(tmp_path, monkeypatch, made, data)
    assert first.summary is not None
    declared = of_active(first.summary)
    telling = [phase for phase, words in declared.items() if "possible" in words]
    assert telling
    for phase in telling:
        assert first.messages[phase] != second.messages[phase]
    for phase in {*first.messages} - {*telling}:
        assert first.messages[phase] == second.messages[phase]


def test_rows_of_one_party_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parse(Recipe, cases.own_rows_recipe(2, then=(cases.PROBE,), epochs=2), "recipe")
    first, second = twice(tmp_path, monkeypatch, made, cases.own_rows(2))
    assert first.messages == second.messages
    assert first.control == second.control
    assert first.summary is not None
    assert set().union(*of_active(first.summary).values()) == {"none"}


def test_a_stratified_division_depends_on_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe([fedonce("pca"), HEAD], split="stratified")
    first, second = twice(tmp_path, monkeypatch, made, cases.digits(2))
    assert first.summary is not None
    assert of_active(first.summary)["open"] == {"possible"}
    assert first.messages["open"] != second.messages["open"]


# Trees draw secret numbers, so that no two runs send the same bytes.
@pytest.mark.parametrize("name", ["splitnn", "early stopping", "fedcvt", "splitnn, then fedhssl"])
def test_messages_follow_from_noisy_labels_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without noise, on a table that has the noisy labels from the start, sends the same."""
    rows: dict[str, Any] = {"aligned": 0.8} if name == "fedcvt" else {}
    task, data = {"kind": "multiclass", "classes": 10}, cases.digits(2)
    made = recipe(TELLING[name], task=task | {"label_epsilon": 1.0}, **rows)
    active = made.active.name
    party = try_party(made, active, parse(DataSettings, data[active], "data"), made.model.encoder)
    assert party.prepared.labels is not None
    assert party.party.rows.data.targets is not None
    decoded = party.prepared.labels.decode(party.party.rows.data.targets)
    noisy = dict(zip(party.prepared.table.ids, decoded, strict=True))
    first = sent(tmp_path / "noise", monkeypatch, made, data)
    plain = recipe(TELLING[name], task=task, **rows)
    second = sent(tmp_path / "noisy", monkeypatch, plain, data, labels=noisy)
    assert first.messages == second.messages
    other = sent(tmp_path / "true", monkeypatch, plain, data)
    assert other.messages != first.messages
    assert first.summary is not None
    assert "randomised" in set().union(*of_active(first.summary).values())
    assert "only after randomised response" in describe_label_exposure(first.summary.exchanges)


def test_a_recipe_that_spells_ids_in_another_way_draws_no_other_noise() -> None:
    """Under a recipe for each spelling, the mean of the draws would tell the labels."""
    rows: dict[str, Any] = {"id_rules": ["casefold"]}
    made = recipe(TELLING["splitnn"], task={"kind": "binary", "label_epsilon": 1.0}, **rows)
    data = cases.columns("sklearn:breast_cancer", 2, limit=60)["p0"]

    def noisy(data: dict[str, Any]) -> list[float]:
        made_of = parse(DataSettings, data, "data")
        targets = try_party(made, "p0", made_of, made.model.encoder).party.rows.data.targets
        assert targets is not None
        return [float(one) for one in targets.reshape(-1)]

    with pytest.raises(InputError, match="draws the noise of a label by its id") as refused:
        noisy(data)
    assert refused.value.code == Code.REFUSED
    # The party's own rules are the same in all recipes.
    assert len(noisy(data | {"id_rules": ["casefold"]})) == 60
