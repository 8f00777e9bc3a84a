"""A scorer: rows in, scores and who took part out, without a run around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import cases
from vfl_common.bundle import Bundle, BundleSpec, Kind, Lenience, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InternalError
from vfl_party.base.step_timing import Clock
from vfl_party.models import combine
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData
from vfl_party.phases.scoring import CHUNK_ROWS, SplitScorer, scoring

CPU = torch.device("cpu")
WIDTH = 8
FIRST = StepKey("any", 4, 3)
RECIPE = Recipe.model_validate(cases.recipe(3))
# A chunk and a half.
ROWS = np.arange(CHUNK_ROWS + 5, dtype=np.int64)[::-1].copy()


class Wire:
    """Carries what the passive parties send to the active party; ``late``: (party, step) that does
    not come in time.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[str, StepKey], Bundle] = {}
        self.late: set[tuple[str, StepKey]] = set()
        self.acknowledged: list[tuple[StepKey, list[str]]] = []
        self.leniences: list[Lenience | None] = []

    def link_of(self, party: str) -> Any:
        asked: deque[StepKey] = deque()

        def send(step: StepKey, bundle: Bundle) -> None:
            self.sent[party, step] = bundle
            asked.append(step)

        def receive(step: StepKey, _expect: BundleSpec) -> Bundle:
            assert asked.popleft() == step
            return Bundle(Kind.ACK)

        return SimpleNamespace(send=send, receive=receive)

    def collect(
        self,
        step: StepKey,
        _expect: BundleSpec,
        arrived: Callable[[str, Bundle], None],
        _deadline_s: float,
        lenience: Lenience | None,
    ) -> dict[str, Bundle]:
        self.leniences.append(lenience)
        found = {
            party: bundle
            for (party, at), bundle in self.sent.items()
            if at == step and (party, at) not in self.late
        }
        for party, bundle in found.items():
            arrived(party, bundle)
        return found

    def reply(self, step: StepKey, replies: dict[str, Bundle]) -> None:
        self.acknowledged.append((step, list(replies)))


def party(name: str, wire: Wire) -> Party:
    torch.manual_seed(int(name[1:]))
    # Dropout tells whether the models are in eval mode.
    encoder = torch.nn.Sequential(torch.nn.Linear(3, WIDTH), torch.nn.Dropout(0.5))
    models: dict[str, torch.nn.Module] = {"encoder": encoder}
    if name == "p0":
        models["top"] = torch.nn.Linear(3 * WIDTH, 10)
    x_NF = torch.randn(len(ROWS), 3)
    features: Any = SimpleNamespace(inputs=lambda rows: (x_NF[torch.from_numpy(rows)],))
    connections: Any = SimpleNamespace(
        link=None if name == "p0" else wire.link_of(name),
        hub=wire if name == "p0" else None,
        server=None,
        clock=Clock(),
        record=None,
    )
    found = Party(name, Course(RECIPE), CPU, models, PartyData({}, features=features))
    found.exchanges.connections.connect(connections)
    return found


def scored(late: set[tuple[str, StepKey]]) -> tuple[Any, list[Party], Wire]:
    wire = Wire()
    parties = [party(f"p{number}", wire) for number in range(3)]
    active, *passives = [SplitScorer(each, "any", scoring(), policy="zeros") for each in parties]
    assert [each.answer(ROWS, FIRST) for each in passives] == [2, 2]
    wire.late = late
    return active.score(ROWS, FIRST, Lenience(1.0)), parties, wire


def by_hand(parties: list[Party], without: dict[str, slice]) -> torch.Tensor:
    z_BD = []
    for each in parties:
        assert each.rows.features is not None
        found = each.models["encoder"].eval()(*each.rows.features.inputs(ROWS)).detach()
        if each.name in without:
            found[without[each.name]] = 0.0
        z_BD.append(found)
    outputs: torch.Tensor = parties[0].models["top"](combine("concat", z_BD)).detach()
    return outputs


def test_rows_are_scored_in_their_order_a_chunk_a_step() -> None:
    found, parties, wire = scored(set())
    torch.testing.assert_close(found.outputs, by_hand(parties, {}))
    assert (found.without, found.steps) == ({}, 2)
    assert wire.acknowledged == [(StepKey("any", 4, batch), ["p1", "p2"]) for batch in (3, 4)]
    assert wire.leniences == [Lenience(1.0)] * 2


def test_a_scorer_says_who_took_no_part_and_how_many_rows_lack_it() -> None:
    found, parties, _ = scored({("p2", StepKey("any", 4, 4))})
    assert found.without == {"p2": 5}
    want = by_hand(parties, {"p2": slice(CHUNK_ROWS, None)})
    torch.testing.assert_close(found.outputs, want)


def test_no_rows_give_no_scores_and_no_steps() -> None:
    wire = Wire()
    none = ROWS[:0]
    assert SplitScorer(party("p1", wire), "any", scoring()).answer(none, FIRST) == 0
    found = SplitScorer(party("p0", wire), "any", scoring()).score(none, FIRST)
    assert (found.outputs.shape, found.steps, wire.sent) == ((0, 10), 0, {})


def test_each_role_has_its_own_side() -> None:
    wire = Wire()
    with pytest.raises(InternalError):
        SplitScorer(party("p1", wire), "any", scoring()).score(ROWS, FIRST)
    with pytest.raises(InternalError):
        SplitScorer(party("p0", wire), "any", scoring()).answer(ROWS, FIRST)
