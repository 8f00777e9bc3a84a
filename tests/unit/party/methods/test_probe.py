"""The probe: its linear model, its vote, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.memory import in_process
from vfl_common.bundle import StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.assembly.trial import try_parties
from vfl_party.methods.probe.exchanges import compute_digests
from vfl_party.methods.probe.phase import ActiveProbe
from vfl_party.methods.probe.settings import ProbeSettings


def probe_of(tmp_path: Path, embedding: int = 8, **settings: Any) -> ActiveProbe:
    """Makes the active side before it has collected anything."""
    tables = cases.own_rows_recipe(2, then=({"kind": "probe"} | settings,))
    tables["model"]["embedding_size"] = embedding
    tables["model"]["encoder"]["channels"] = [4, embedding]
    made = Recipe.model_validate(tables | {"simulate": {"parties": cases.own_rows(2)}})
    found = try_parties(made, tmp_path)["p0"].phases[1]
    assert isinstance(found, ActiveProbe)
    return found


def known(x: Tensor) -> Any:
    from vfl_party.methods.probe.phase import KnownRows

    return KnownRows(np.arange(len(x), dtype=np.int64), x)


@pytest.mark.parametrize("temperature", [0.001, 0.1])
def test_a_cold_vote_is_that_of_float64(temperature: float, tmp_path: Path) -> None:
    probe = probe_of(tmp_path, temperature=temperature, neighbours=5)
    random = torch.Generator().manual_seed(1)
    x, bank = torch.rand(20, 6, generator=random), torch.rand(40, 6, generator=random)
    y = torch.randint(0, 10, (40,), generator=random)
    cosine = (
        torch.nn.functional.normalize(x.double()) @ torch.nn.functional.normalize(bank.double()).T
    )
    near = cosine.topk(5, dim=1)
    # Of 1: the same shares.
    weights = ((near.values - 1) / temperature).exp()
    votes = torch.zeros(20, 10, dtype=torch.float64).scatter_add_(1, y[near.indices], weights)
    want = (votes / votes.sum(1, keepdim=True)).clamp_min(1e-12).log()
    torch.testing.assert_close(
        probe._compute_votes(x, bank, y).double(), want, rtol=1e-3, atol=1e-3
    )


class Answers:
    """Stands in for the exchange: gives each sender's message of a step."""

    def __init__(self, ids: dict[str, Tensor]) -> None:
        self._ids = ids

    def collect(
        self, step: StepKey, each: dict[str, dict[str, int]]
    ) -> dict[str, dict[str, Tensor]]:
        _ = step
        return {
            name: {"z": torch.zeros(of["rows"], 4, 4, 4), "ids": self._ids[name][: of["rows"]]}
            for name, of in each.items()
        }

    def acknowledge(self, step: StepKey, parties: Any) -> None: ...


def test_one_id_for_several_rows_is_refused(tmp_path: Path) -> None:
    probe = probe_of(tmp_path)
    party = probe._party
    every = compute_digests(party.recipe, party.rows.data.ids)
    probe._latents._latents = Answers({"p1": every[:1].expand(60, -1), "p2": every})  # type: ignore[assignment]
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1", party="p1"):
        probe._collect(0)
    probe._latents._latents = Answers({"p1": every[60:], "p2": every})  # type: ignore[assignment]
    # In another split.
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        probe._collect(0)


def test_ids_at_two_parties_are_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = cases.own_rows(2)
    data["p2"]["view"]["part"] = 0
    in_process(tmp_path / "run", cases.own_rows_recipe(2, epochs=1, then=(cases.PROBE,)), data)
    advice = [
        each.getMessage() for each in caplog.records if getattr(each, "event", "") == "advice"
    ]
    assert advice == ["phase probe: several parties hold 60 of the ids"]


def test_a_split_that_is_named_twice(tmp_path: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        probe_of(tmp_path, splits=["test", "test"])
    assert ProbeSettings(splits=("test",)).splits == ("test",)
