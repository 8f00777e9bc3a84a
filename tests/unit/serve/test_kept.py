"""Embeddings that the active party keeps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vfl_common.rpc.serving.stream import (
    EMBEDDED,
    FAILED,
    LATE,
    NOT_ANSWERED,
    CachePolicy,
    ServingAnswer,
)
from vfl_serve.stores.kept import KeptEmbeddings

STATES = {"u": NOT_ANSWERED, "r": NOT_ANSWERED}


class Parties:
    """Answers as two passive parties do; ``asked``: {party: the ids of each question}."""

    def __init__(self, **keeping: CachePolicy) -> None:
        self.allowed = keeping
        self.asked: dict[str, list[list[str]]] = {"p1": [], "p2": []}
        self.instead: dict[str, Any] = {}

    def keeping(self) -> Mapping[str, CachePolicy]:
        return self.allowed

    def ask(
        self,
        ids: Sequence[str],
        timeout_s: float,
        ids_of: Mapping[str, Sequence[str]] | None = None,
    ) -> Any:
        _ = timeout_s
        found: dict[str, Any] = {}
        for name, asked in self.asked.items():
            own = list((ids_of or {}).get(name, ids))
            if own:
                asked.append(own)
            found[name] = self.instead.get(name, self.answer(name, own))
        return SimpleNamespace(wait=lambda: dict(found))

    def answer(self, name: str, ids: Sequence[str]) -> ServingAnswer:
        state = bytes(STATES.get(each[0], EMBEDDED) for each in ids)
        z = [vector(name, each) for each in ids if each[0] not in STATES]
        allowed = self.allowed.get(name, CachePolicy())
        return ServingAnswer(state, b"".join(z), allowed.features or "v")


def vector(name: str, id_: str) -> bytes:
    return np.array([hash((name, id_)) % 97, len(id_)], "<f4").tobytes()


def kept(parties: Parties, mib: int = 1) -> tuple[KeptEmbeddings, Counter[str]]:
    counts: Counter[str] = Counter()

    def used(party: str, rows: int) -> None:
        counts[party] += rows

    return KeptEmbeddings(parties, mib, used), counts


def same(found: Mapping[str, Any], parties: Parties, ids: Sequence[str]) -> bool:
    want = {name: parties.answer(name, ids) for name in ("p1", "p2")}
    return all(
        (found[name].state, found[name].embeddings) == (each.state, each.embeddings)
        for name, each in want.items()
    )


def test_answers_are_the_same_and_fewer_are_asked_for() -> None:
    parties = Parties(p1=CachePolicy(60.0, "v"))
    cache, counts = kept(parties)
    for ids in (["a", "b"], ["b", "u1", "c", "a", "b"], ["u1", "r1", "a"], ["c"]):
        assert same(cache.ask(ids, 1.0).wait(), parties, ids)
    # Who is unknown or refused is asked for again.
    assert parties.asked["p1"] == [["a", "b"], ["u1", "c"], ["u1", "r1"]]
    assert parties.asked["p2"] == [["a", "b"], ["b", "u1", "c", "a", "b"], ["u1", "r1", "a"], ["c"]]
    assert counts == {"p1": 5}


def test_nothing_is_kept_that_a_party_does_not_allow() -> None:
    parties = Parties()
    cache, counts = kept(parties)
    for _ in range(2):
        cache.ask(["a"], 1.0).wait()
    # Later it does, and what was sent before is not used; then it does no more.
    parties.allowed = {"p1": CachePolicy(60.0, "v")}
    cache.ask(["a"], 1.0).wait()
    parties.allowed = {}
    cache.ask(["a"], 1.0).wait()
    assert len(parties.asked["p1"]) == 4
    assert not counts
    # Without memory, too.
    parties.allowed = {"p1": CachePolicy(60.0, "v")}
    cache, _ = kept(parties, mib=0)
    for _ in range(2):
        cache.ask(["a"], 1.0).wait()
    assert len(parties.asked["p1"]) == 6


def test_embeddings_of_other_features_or_of_long_ago_are_not_used() -> None:
    parties = Parties(p1=CachePolicy(60.0, "v"))
    cache, counts = kept(parties)
    cache.ask(["a"], 1.0).wait()
    parties.allowed = {"p1": CachePolicy(60.0, "w")}
    cache.ask(["a"], 1.0).wait()
    assert len(parties.asked["p1"]) == 2
    parties.allowed = {"p1": CachePolicy(0.05, "w")}
    time.sleep(0.06)
    cache.ask(["a"], 1.0).wait()
    assert len(parties.asked["p1"]) == 3
    assert not counts


@pytest.mark.parametrize(("absent", "state"), [("late", LATE), ("failed", FAILED)])
def test_who_is_absent_is_so_for_the_others_alone(absent: str, state: int) -> None:
    parties = Parties(p1=CachePolicy(60.0, "v"))
    cache, _ = kept(parties)
    cache.ask(["a"], 1.0).wait()
    parties.instead["p1"] = absent
    found = cache.ask(["b", "a"], 1.0).wait()["p1"]
    assert isinstance(found, ServingAnswer)
    assert (found.state, found.embeddings) == (bytes([state, EMBEDDED]), vector("p1", "a"))
    parties.instead["p1"] = "away"
    assert cache.ask(["b", "a"], 1.0).wait()["p1"] == "away"


def test_what_is_no_number_is_not_kept() -> None:
    parties = Parties(p1=CachePolicy(60.0, "v"))
    cache, _ = kept(parties)
    bad = np.array([np.nan, 1.0], "<f4").tobytes()
    parties.instead["p1"] = ServingAnswer(bytes([EMBEDDED]), bad, "v")
    cache.ask(["a"], 1.0).wait()
    parties.instead.clear()
    assert same(cache.ask(["a"], 1.0).wait(), parties, ["a"])


def test_memory_is_bounded_and_what_was_used_longest_ago_goes() -> None:
    parties = Parties(p1=CachePolicy(60.0, "v"))
    cache, counts = kept(parties)
    cache.ask(["first"], 1.0).wait()
    for start in range(0, 10_000, 500):
        cache.ask([f"k{number}" for number in range(start, start + 500)], 1.0).wait()
        cache.ask(["first"], 1.0).wait()
    assert cache._bytes <= 1 << 20
    assert 1_000 < len(cache._entries) < 10_000
    assert counts == {"p1": 20}
    asked = len(parties.asked["p1"])
    cache.ask(["k0"], 1.0).wait()
    assert len(parties.asked["p1"]) == asked + 1
