"""Columns as shards: worker processes of a party give what one process gives, and end with it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from tests.harness.errors import raises
from tests.harness.federation import RUN_S, Federation, Program
from tests.harness.memory import run_here
from tests.harness.plugins import environment
from tests.harness.waiting import wait_until
from tests.integration.test_psi_pool import runs
from tests.integration.test_resume import held, kill
from tests.integration.test_secureboost import forest, made_table, recipe
from vfl_common.errors import Code, InputError
from vfl_party.homomorphic import CipherError, make_adder, make_keys
from vfl_party.homomorphic.paillier import PaillierAdder
from vfl_party.homomorphic.scheme import PlainAdder
from vfl_party.homomorphic.shard import Board
from vfl_party.homomorphic.shards import (
    Shards,
    SummingInShards,
    make_summing,
    share_adder,
    share_keys,
)
from vfl_party.homomorphic.sums import BELOW, BELOW_AND_LAST, SINGLE, SummingHere, SumPlan

BITS = 1024
ROWS = 300
# The last code of each column.
LAST = (4, 5, 3, 5, 3)

# A parent that says who its workers are, keeps them busy, and waits for its end.
PARENT = """
import numpy as np
import psutil
from vfl_party.homomorphic import make_keys
from vfl_party.homomorphic.shards import Shards, share_keys
keys = share_keys(make_keys("paillier", 1024, with_heu=False)[0], Shards(2))
keys.encrypt(np.ones(4, np.int64), np.ones(4, np.int64))
print(*(each.pid for each in psutil.Process().children()), flush=True)
keys.encrypt(np.ones(1_000_000, np.int64), np.ones(1_000_000, np.int64))
"""


def plan() -> SumPlan:
    """Numbers with and without missing cells, and categories, mixed over five columns."""
    wanted = [(0, BELOW, code) for code in range(1, 5)]
    wanted += [(1, BELOW, 2), (3, BELOW, 2), (1, BELOW_AND_LAST, 2), (3, BELOW, 1)]
    wanted += [(column, SINGLE, code) for column in (2, 4) for code in range(4)]
    return SumPlan.of(np.array([(*each, LAST[each[0]]) for each in wanted], np.int32))


def gradients() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    codes = draw.integers(0, np.array(LAST) + 1, (ROWS, len(LAST))).astype(np.int8)
    return draw.integers(-(2**45), 2**45, ROWS), draw.integers(0, 2**43, ROWS), codes


@pytest.fixture
def shards() -> Iterator[Shards]:
    found = Shards(2)
    yield found
    found.close()


def children(of: int) -> list[psutil.Process]:
    """Returns the shards of a process."""
    return [each for each in psutil.Process(of).children() if runs(each)]


@pytest.mark.parametrize("encryption", ["none", "paillier"])
@pytest.mark.parametrize("workers", [2, 4])
def test_sums_are_those_of_one_process_bit_for_bit(
    encryption: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainAdder, "pays_from", 0)
    g, h, codes = gradients()
    keys, public = make_keys(encryption, BITS, with_heu=False)
    alone = make_adder(encryption, BITS, public)
    members = [np.arange(0, ROWS, 2), np.array([7]), np.arange(1, 200, 2)]
    own, others = Shards(workers), Shards(workers)
    try:
        many = share_adder(alone, others)
        for _ in range(2):
            # A second tree takes the place of the first.
            wire = share_keys(keys, own).encrypt(g, h)
            assert [each.tolist() for each in keys.decrypt(alone.wire(alone.load(wire)), ROWS)] == [
                g.tolist(),
                h.tolist(),
            ]
            here = make_summing(Shards(1), alone, wire, codes, plan())
            there = make_summing(others, many, wire, codes, plan())
            assert (type(here), type(there)) == (SummingHere, SummingInShards)
            found = here.sums(members)
            for _ in range(2):
                for a, b in zip(found, there.sums(members), strict=True):
                    assert (alone.raw(a) == many.raw(b)).all()
            # As many ciphertexts on the wire, with the same in them.
            held_ = alone.concatenate(found)
            one, several = alone.wire(held_), many.wire(held_)
            assert one.shape == several.shape
            assert several.flags.writeable
            count = len(alone.raw(held_))
            for a, b in zip(
                keys.decrypt(one, count), share_keys(keys, own).decrypt(several, count), strict=True
            ):
                assert (a == b).all()
            g, h = h, abs(g)
    finally:
        own.close()
        others.close()


@pytest.mark.parametrize("count", [1, 14, 15, 16, 31, 100, 307])
def test_any_number_of_sums_is_packed_as_by_one_process(count: int, shards: Shards) -> None:
    keys, public = make_keys("paillier", BITS, with_heu=False)
    many = share_adder(make_adder("paillier", BITS, public), shards)
    g, h = np.arange(count) - 5, np.arange(count)
    held_ = many.load(keys.encrypt(g, h))
    found = keys.decrypt(many.wire(held_), count)
    assert [each.tolist() for each in found] == [g.tolist(), h.tolist()]


def test_small_tables_and_one_core_start_no_process(shards: Shards) -> None:
    g, h, codes = gradients()
    plain = PlainAdder()
    wire = plain.raw(np.stack([g, h], axis=1))
    assert isinstance(make_summing(shards, plain, wire, codes, plan()), SummingHere)
    before = children(os.getpid())
    keys, public = make_keys("paillier", BITS, with_heu=False)
    one = Shards(1)
    assert share_keys(keys, one) is keys
    assert type(share_adder(make_adder("paillier", BITS, public), one)) is PaillierAdder
    assert children(os.getpid()) == before


@pytest.mark.parametrize("fill", [0, 255])
def test_a_ciphertext_out_of_range_is_refused(fill: int, shards: Shards) -> None:
    keys, public = make_keys("paillier", BITS, with_heu=False)
    many = share_adder(make_adder("paillier", BITS, public), shards)
    wire = keys.encrypt(*gradients()[:2])
    wire[1] = fill
    with raises(CipherError):
        make_summing(shards, many, wire, gradients()[2], plan())
    with raises(CipherError):
        share_keys(keys, shards).decrypt(wire[:2], 2)


def test_a_worker_that_is_killed_within_a_tree_is_replaced(shards: Shards) -> None:
    keys, public = make_keys("paillier", BITS, with_heu=False)
    many, before = share_adder(make_adder("paillier", BITS, public), shards), children(os.getpid())
    g, h, codes = gradients()
    of, rows = make_summing(shards, many, keys.encrypt(g, h), codes, plan()), np.arange(ROWS)
    (want,) = of.sums([rows])
    killed = [each for each in children(os.getpid()) if each not in before]
    for each in killed:
        each.kill()
    (found,) = of.sums([rows])
    assert (many.raw(found) == many.raw(want)).all()
    assert not set(killed) & set(children(os.getpid()))


def first_of(start: Any, error: OSError) -> Any:
    """Starts one process, and no more."""
    left = [start]

    def started(*args: Any, **options: Any) -> Any:
        if not left:
            raise error
        return left.pop()(*args, **options)

    return started


def test_a_machine_without_room_for_workers_is_one_sentence(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = share_keys(make_keys("paillier", BITS, with_heu=False)[0], shards)
    before, ones = children(os.getpid()), np.ones(4, np.int64)
    start, full = subprocess.Popen, BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    of_ours = "vfl_common.process.workers.subprocess.Popen"
    with monkeypatch.context() as patched:
        patched.setattr(of_ours, first_of(start, full))
        with raises(InputError, Code.CONFIG_INVALID):
            keys.encrypt(ones, ones)
    assert children(os.getpid()) == before
    keys.encrypt(ones, ones)
    # Nor may one take the place of another. As soon as there is room, the work goes on.
    for each in children(os.getpid()):
        if each not in before:
            each.kill()
    with monkeypatch.context() as patched:
        patched.setattr(of_ours, Mock(side_effect=full))
        for _ in range(3):
            with raises(InputError, Code.CONFIG_INVALID):
                keys.encrypt(ones, ones)
    keys.encrypt(ones, ones)


def test_a_message_has_no_more_bytes_than_it_can_count(shards: Shards) -> None:
    rows = 100_000_000
    pieces = shards.pieces(rows)
    assert [*pieces[0:1], pieces[-1].stop] == [slice(0, pieces[0].stop), rows]
    assert all(before.stop == each.start for before, each in pairwise(pieces))
    # A ciphertext of the longest key has 1 KiB.
    assert max(each.stop - each.start for each in pieces) << 10 < 1 << 32


def test_workers_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    wait_until(lambda: [each for each in workers if runs(each)], lambda left: not left)


def test_a_shard_is_a_small_process() -> None:
    code = "import sys, vfl_party.homomorphic.shard; print({'torch', 'grpc'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_board_gives_what_was_put() -> None:
    board, draw = Board(), np.random.default_rng(1)
    arrays = [draw.integers(0, 9, shape).astype(np.int64) for shape in ((3, 5), (7,), (0,), (2, 2))]
    for _ in range(2):
        places, last = [], None
        for each in arrays:
            places.append(last := board.put(each, last))
        reader = Board(os.dup(board.number))
        for each, place in zip(arrays, places, strict=True):
            assert (reader.get(type(place).read(place.to_bytes()), np.int64) == each).all()
        reader.close()
        arrays = [each + 1 for each in arrays]
    board.close()


@pytest.mark.parametrize("encryption", ["none", "paillier"])
def test_columns_of_both_sides_in_shards_grow_the_same_trees(
    encryption: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with samples of rows and columns, which are others in each tree."""
    settings = {"trees": 3, "row_sample": 0.7, "column_sample": 0.6, "key_bits": BITS}
    monkeypatch.setattr("vfl_party.methods.secureboost.passive.has_heu", lambda: False)
    for each in (PlainAdder, PaillierAdder):
        monkeypatch.setattr(each, "pays_from", 0)
    shared = Mock(wraps=SummingInShards)
    monkeypatch.setattr("vfl_party.homomorphic.shards.SummingInShards", shared)
    found, before = [], children(os.getpid())
    for threads in (1, 2):
        used = encryption if threads > 1 else "none"
        tables = recipe(2, {"kind": "binary"}, **settings, encryption=used)
        folder = tmp_path / str(threads)
        data = made_table(folder, 2, "binary")
        _, federation = run_here(folder, tables | {"simulate": {"threads": threads}}, data)
        found.append({name: forest(federation, name) for name in federation.names})
        # Three trees of two parties.
        assert shared.call_count == (6 if threads > 1 else 0)
    assert found[0] == found[1]
    # They end with the phase.
    assert children(os.getpid()) == before


class WithoutHeu(Federation):
    """A federation of parties with two cores, of which p1 has no HEU: gmpy2 computes Paillier."""

    def write_party(self, name: str) -> Path:
        self.extra[name] = self.extra.get(name, {}) | {"threads": 2}
        return super().write_party(name)

    def _start(
        self, name: str, args: list[str], environment_: dict[str, str] | None = None
    ) -> Program:
        if name != "p1":
            return super()._start(name, args, environment_)
        if name in self.programs:
            self.programs[name].close()
        hidden = self.folder / "hidden" / "heu"
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / "__init__.py").write_text("raise ImportError\n")
        of = environment(hidden.parent)
        self.programs[name] = Program(name, args, self.folder, fresh=True, environment=of)
        return self.programs[name]


@pytest.mark.parametrize("victim", ["a worker of p1", "p1"])
def test_real_programs_with_shards_grow_the_trees_of_one_process(
    victim: str, tmp_path: Path
) -> None:
    """Also if a worker is killed in the middle of a tree, or the party that has it."""
    settings = {"trees": 3, "encryption": "paillier", "key_bits": BITS}
    tables = recipe(2, {"kind": "binary"}, **settings)
    # The killed party starts as a fresh process, which takes long on a busy machine.
    tables["run"]["rejoin_deadline_s"] = RUN_S
    plain = recipe(2, {"kind": "binary"}, **settings | {"encryption": "none"})
    _, whole = run_here(tmp_path / "whole", plain, made_table(tmp_path / "whole", 2, "binary"))
    folder = tmp_path / "killed"
    data = made_table(folder, 2, "binary")
    # Within the second tree, of three: each sends 400 ciphertexts of 256 bytes.
    with held(folder, tables, data, WithoutHeu, received=150_000) as (killed, proxy):
        party = killed.programs["p1"]
        workers = [each for each in children(party.pid) if "homomorphic.shard" in line(each)]
        assert len(workers) == 2
        assert all(each.memory_info().rss < 200 * 2**20 for each in workers)
        if victim == "p1":
            kill(killed, proxy, "p1")
            wait_until(lambda: [each for each in workers if runs(each)], lambda left: not left)
        else:
            for each in workers:
                each.kill()
            proxy.release()
        summary = killed.finish()
    assert summary["interruptions"] == (victim == "p1")
    for name in killed.names:
        assert forest(killed, name) == forest(whole, name)


def line(of: psutil.Process) -> str:
    return " ".join(of.cmdline())
