"""Private alignment: the whole protocol among threads, compared with a plain intersection of sets."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.harness import cases
from vfl_common.errors import Code, PeerError
from vfl_common.link import Hub, Link
from vfl_common.rpc.memory import MemoryHub, MemoryLink
from vfl_party.align import psi
from vfl_party.align.aligned import Aligned, Aligning
from vfl_party.align.psi import PsiAlignment
from vfl_party.data import Table
from vfl_party.policies.allow_all import AllowAll
from vfl_server.intersection import serve

WAIT_S = 60.0


@dataclass
class Ways:
    link: Link | None = None
    hub: Hub | None = None
    server: Link | None = None


def recipe_of(parties: int, **rows: Any) -> Any:
    tables = cases.recipe(parties, task={"kind": "binary"}, rows={"align": "psi", **rows})
    from vfl_common.config.base import parse
    from vfl_common.config.recipe import Recipe

    return parse(Recipe, tables, "recipe")


def align(folder: Path, sets: Sequence[Sequence[str]], run_id: str = "run", **rows: Any) -> dict[str, Aligned]:
    """Aligns sets of ids, one a party, each in a thread; returns what each party gets. Raises the first error."""
    recipe = recipe_of(len(sets), **rows)
    names = [party.name for party in recipe.parties]
    ring = [recipe.active.name, *(party.name for party in recipe.passives)]
    hub = MemoryHub(ring[0], ring[1:], timeout_s=WAIT_S)
    server = MemoryHub(recipe.server, names, timeout_s=WAIT_S)

    def take_part(name: str, ids: Sequence[str]) -> Aligned:
        to_server = MemoryLink(server, name, timeout_s=WAIT_S)
        ways = Ways(hub=hub, server=to_server)
        if name != ring[0]:
            ways = Ways(link=MemoryLink(hub, name, timeout_s=WAIT_S), server=to_server)
        own = folder / run_id / name
        own.mkdir(parents=True, exist_ok=True)
        table = Table(f"{name}.csv", tuple(sorted(ids)), labels=np.zeros(len(ids)) if name == ring[0] else None)
        try:
            return PsiAlignment(recipe, AllowAll()).align(Aligning(name, run_id, table, own, ways))
        except BaseException as error:
            for each in (hub, server):
                each.end(error if isinstance(error, PeerError) else PeerError(Code.ABORTED, f"{error!r}"))
            raise

    def answer() -> None:
        try:
            serve(server, ring, recipe.rows.at_least)
        except PeerError as error:
            server.end(error)
            hub.end(error)

    with ThreadPoolExecutor(len(sets) + 1) as threads:
        served = threads.submit(answer)
        futures = {name: threads.submit(take_part, name, ids) for name, ids in zip(names, sets, strict=True)}
        found = {name: each.result(WAIT_S) for name, each in futures.items()}
        server.end(PeerError(Code.ABORTED, "over"))
        served.result(WAIT_S)
    return found


IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_the_rows_are_those_of_a_plain_intersection(
    parties: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psi, "BATCH", 16)  # several batches of few rows
    drawn = np.random.default_rng(parties)
    sets = [sorted({f"ü{each}" for each in drawn.integers(0, 150, 40 + 30 * k)} | {"both"}) for k in range(parties)]
    found = align(tmp_path, sets)
    common = tuple(sorted(set.intersection(*map(set, sets))))
    assert len(common) > 1
    for aligned in found.values():
        assert aligned.ids == common
