"""Private alignment: what each party, the server and whoever reads the wire see of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from tests.harness.aligning import (
    SERVER,
    Parties,
    Recorder,
    Said,
    in_common,
    sets_of,
    small_batches,
)
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import InterruptedRun
from vfl_common.psi import PHASE, TAG_BYTES
from vfl_party.align import state
from vfl_party.align.digest import PASSES_FOUND, compute_slow_digest
from vfl_party.align.exchanges import INTRODUCTION_BYTES
from vfl_party.align.state import Attempt
from vfl_party.psi import curve, sealed
from vfl_party.psi.curve import POINT_BYTES

P, A = 2**255 - 19, 486662
# (whose row, by whose keys it is masked).
Point = tuple[str, frozenset[str]]


small = small_batches()
# {public key: secret one}, of all key pairs.
SEALS: dict[bytes, bytes] = {}


@pytest.fixture(scope="module", autouse=True)
def seals() -> Iterator[None]:
    """Remembers the keys for sealing, which a party keeps nowhere."""
    new = sealed.KeyPair.new

    def remembered() -> sealed.KeyPair:
        made = new()
        SEALS[made.public] = made.secret
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed.KeyPair, "new", remembered)
        yield


def split(points: bytes, size: int = POINT_BYTES) -> list[bytes]:
    assert len(points) % size == 0
    return [points[start : start + size] for start in range(0, len(points), size)]


class Watched(Recorder):
    """Records, and reads the parties' secrets as soon as they have them."""

    def __init__(self, parties: Parties) -> None:
        super().__init__()
        self.parties, self.ring = parties, list(parties.sets)
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.seals: dict[str, sealed.KeyPair] = {}
        parties.tap = self

    def __call__(self, sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if step.phase == PHASE and step.round > 0 and sender not in (SERVER, *self.secrets):
            state = json.loads(
                (self.parties.folder_of(sender) / "alignment" / "state.json").read_text()
            )
            self.secrets[sender] = {
                name: bytes.fromhex(value)
                for name, value in state.items()
                if isinstance(value, str)
            }
        if "introductions" in bundle.tensors:
            said = split(bytes(bundle.tensors["introductions"].data), INTRODUCTION_BYTES)
            publics = (each[2 : 2 + sealed.PUBLIC_BYTES] for each in said)
            self.seals = {
                name: sealed.KeyPair(SEALS[each])
                for name, each in zip(self.ring, publics, strict=True)
            }
        return super().__call__(sender, receiver, step, bundle)

    def masked(self) -> list[Said]:
        """All bundles of masked points."""
        return [each for each in self.said if "points" in each.tensors]

    def is_relayed(self, each: Said) -> bool:
        """Whether a bundle passes the active party on its way between two others."""
        active, other = self.ring[0], each.receiver if each.sender == self.ring[0] else each.sender
        return other != (self.ring[1] if each.sender == active else self.ring[-1])

    def opened(self, each: Said) -> bytes:
        """Returns the points of a bundle, which the receiver may have to open."""
        if not self.is_relayed(each) or each.sender != self.ring[0]:
            return each.tensors["points"]
        number = self.ring.index(each.receiver)
        sender, secrets = self.ring[number - 1], self.secrets
        context = (
            f"{self.parties.run_id} {secrets[sender]['name'].hex()} {number} {each.step}".encode()
        )
        public = self.seals[sender].public
        return self.seals[each.receiver].open(public, context, each.tensors["points"], sender)

    def clear(self) -> list[tuple[str, list[bytes]]]:
        """(who sees points, the points), for all bundles; what is sealed is seen by its last
        receiver.
        """
        found = []
        for each in self.masked():
            if not (self.is_relayed(each) and each.receiver == self.ring[0]):
                found.append((each.receiver, split(self.opened(each))))
        return found

    def points(self) -> dict[bytes, Point]:
        """All points that the rows can become on their way round the ring."""
        salt = self.parties.run_id.encode() + self.secrets[self.ring[0]]["name"]
        found: dict[bytes, Point] = {}
        for number, owner in enumerate(self.ring):
            now = curve.hash_ids([each.encode() for each in self.parties.sets[owner]], salt)
            order = [*self.ring[number:], *self.ring[:number]]
            for count, masker in enumerate(order, 1):
                now = curve.mask(now, self.secrets[masker]["secret"])
                # Masked by all, the same rows of two owners are the same point.
                if count < len(order):
                    found |= dict.fromkeys(split(now), (owner, frozenset(order[:count])))
        return found


def watched(folder: Path, sets: Sequence[Sequence[str]], run_id: str = "run") -> Watched:
    """Aligns; returns what was seen."""
    parties = Parties(folder, sets_of(*sets), run_id)
    found = Watched(parties)
    common = in_common(parties.sets)
    assert {tuple(each.ids) for each in parties.align().values()} == {common}
    return found


def some(parties: int) -> list[list[str]]:
    return [
        [f"id-{number:03}" for number in range(5 * each, 30 + 9 * each)] for each in range(parties)
    ]


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_every_masked_point_is_on_the_curve(parties: int, tmp_path: Path) -> None:
    seen = [point for _, points in watched(tmp_path, some(parties)).clear() for point in points]
    assert len(seen) > 30 * parties * (parties - 1)
    for each in seen:
        u = int.from_bytes(each, "little")
        assert u < P
        # Euler: a square, so not of the twist.
        assert pow(u**3 + A * u**2 + u, (P - 1) // 2, P) == 1


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_nobody_sees_two_sets_under_the_same_keys(parties: int, tmp_path: Path) -> None:
    """Nor after masking them by its own key, which it may do to whatever it gets."""
    run = watched(tmp_path, some(parties))
    known = run.points()
    sight: dict[str, set[Point]] = {name: {(name, frozenset())} for name in run.ring}
    for name, points in run.clear():
        # KeyError: masked by all keys, or by a key of nobody.
        kinds = {known[each] for each in points}
        # 0: the set has fewer batches than another.
        assert len(kinds) <= 1
        sight[name] |= kinds
    for name, kinds in sight.items():
        # Each set once.
        assert len(kinds) == parties
        assert len({keys | {name} for _, keys in kinds}) == parties
        assert not [keys for owner, keys in kinds if owner != name and owner not in keys]


@pytest.mark.parametrize("parties", [3, 5])
def test_the_active_party_relays_what_it_cannot_read(parties: int, tmp_path: Path) -> None:
    run = watched(tmp_path, some(parties))
    relayed = [each for each in run.masked() if run.is_relayed(each)]
    assert len(relayed) > 2
    known = run.points()
    for each in relayed:
        content = each.tensors["points"]
        windows = {content[start : start + POINT_BYTES] for start in range(len(content))}
        assert not windows & known.keys()
    up = [each.tensors["points"] for each in relayed if each.receiver == run.ring[0]]
    down = [each.tensors["points"] for each in relayed if each.sender == run.ring[0]]
    assert sorted(up) == sorted(down)
    assert len(set(up)) == len(up)


def test_the_same_batch_is_sealed_differently_each_time(tmp_path: Path) -> None:
    parties = Parties(tmp_path, sets_of(*some(3)))
    first = Watched(parties)

    def until_round_2(sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if (step.phase, step.round, step.batch) == (PHASE, 1, 2):
            raise InterruptedRun("a test asked for it")
        return first(sender, receiver, step, bundle)

    parties.tap = until_round_2
    parties.outcomes()
    # p2 forgets what it has got, and is sent it again.
    for each in ("2.points", "3.points"):
        (parties.folder_of("p2") / "alignment" / each).unlink(missing_ok=True)
    again = Watched(parties)
    parties.align()

    def sent(run: Watched) -> dict[StepKey, tuple[bytes, bytes]]:
        found = [each for each in run.masked() if each.receiver == "p2"]
        return {each.step: (each.tensors["points"], run.opened(each)) for each in found}

    one, other = sent(first), sent(again)
    assert one
    for step, (content, points) in one.items():
        assert other[step][1] == points
        assert other[step][0] != content


def test_the_server_sees_sizes_and_tags_alone(tmp_path: Path) -> None:
    run = watched(tmp_path, some(3))
    seen = [each for each in run.said if each.receiver == SERVER]
    assert len(seen) == 3 * 3
    digests = [each.tensors["digest"] for each in seen if "digest" in each.tensors]
    common = in_common(run.parties.sets)
    publics = b"".join(run.seals[name].public for name in run.ring)
    salt = hashlib.sha256(b"vfl common rows" + run.secrets["p0"]["name"] + publics).digest()
    slow = compute_slow_digest(salt, common, PASSES_FOUND)
    # A salt that it does not know.
    assert digests == [hmac.digest(slow, b"lists", "sha256")] * 3
    assert not [
        each
        for each in run.said
        if each.sender == SERVER and run.secrets["p0"]["name"] in each.tensors.values()
    ]
    sizes = {name: len(ids) for name, ids in run.parties.sets.items()}
    owner = dict(zip(run.ring, [*run.ring[1:], run.ring[0]], strict=True))
    # From which nobody finds the 16 random bytes.
    word = hashlib.sha256(b"vfl attempt at the server" + run.secrets["p0"]["name"]).digest()
    salt = run.parties.run_id.encode() + run.secrets["p0"]["name"]
    for each in seen:
        if "sizes" in each.tensors:
            assert each.tensors.keys() == {"sizes", "attempt"}
            assert each.tensors["attempt"] == word
            said = np.frombuffer(each.tensors["sizes"], "<i8").tolist()
            assert said == [sizes[each.sender], sizes[owner[each.sender]]]
            continue
        if "digest" in each.tensors:
            continue
        assert each.tensors.keys() == {"tags"}
        points = curve.hash_ids(
            [row.encode() for row in run.parties.sets[owner[each.sender]]], salt
        )
        for name in run.ring:
            points = curve.mask(points, run.secrets[name]["secret"])
        assert TAG_BYTES == 12
        assert sorted(split(each.tensors["tags"], 12)) == sorted(
            point[:12] for point in split(points)
        )


# -- the order in which rows are shown


def shown(run: Watched) -> dict[str, list[int]]:
    """{owner: for each place in the order in which it shows its rows, the place of that row in its
    table}.
    """
    salt, found = run.parties.run_id.encode() + run.secrets["p0"]["name"], {}
    for number, name in enumerate(run.ring):
        ids = [each.encode() for each in run.parties.sets[name]]
        points = split(curve.mask(curve.hash_ids(ids, salt), run.secrets[name]["secret"]))
        place = {each: row for row, each in enumerate(points)}
        receiver = run.ring[(number + 1) % len(run.ring)]
        sent = [
            points
            for who, points in run.clear()
            if who == receiver and points and points[0] in place
        ]
        found[name] = [place[each] for points in sent for each in points]
        assert sorted(found[name]) == list(range(len(ids)))
    return found


def test_the_order_of_the_rows_says_nothing_and_is_another_each_time(tmp_path: Path) -> None:
    """Of 200 rows, 1 is at its own place on average, and 12 in one shuffle of 10^9."""
    ids = [f"id-{number:03}" for number in range(200)]
    first = watched(tmp_path, [ids] * 3, "first")
    for each in ("first", "second"):
        shutil.rmtree(tmp_path / each, ignore_errors=True)
    second = watched(tmp_path, [ids] * 3, "second")
    orders = [*shown(first).values(), *shown(second).values()]
    for number, one in enumerate(orders):
        for other in (list(range(200)), *orders[:number]):
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12
            # 7 standard deviations.
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.5
    assert not {*first.points()} & {*second.points()}


def test_the_order_is_drawn_from_a_cipher_and_is_the_same_everywhere() -> None:
    """An unfinished alignment resumes after NumPy has been updated."""
    order = Attempt(seed=bytes(range(32))).order(10)
    assert order.tolist() == [7, 9, 6, 1, 5, 0, 3, 4, 2, 8]
    many = Attempt(seed=bytes(31) + b"\1").order(1 << 16)
    assert sorted(many.tolist()) == list(range(1 << 16))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 2048, 5000])
def test_an_order_that_is_drawn_in_pieces_is_that_of_all_numbers_at_once(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = bytes(range(32))
    drawn = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * rows))
    at_once = np.argsort(np.frombuffer(drawn, "<u8"), kind="stable")
    monkeypatch.setattr(state, "_CHUNK", 64)
    monkeypatch.setattr(state, "_SORTED", 100)
    assert np.array_equal(Attempt(seed=seed).order(rows), at_once)


def test_two_attempts_of_a_run_show_no_point_twice(tmp_path: Path) -> None:
    parties = Parties(tmp_path, sets_of(*some(3)))
    first = Watched(parties)

    def until_tags(sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if receiver == SERVER:
            raise InterruptedRun("a test asked for it")
        return first(sender, receiver, step, bundle)

    parties.tap = until_tags
    parties.outcomes()
    shutil.rmtree(parties.folder_of("p1") / "alignment")
    second = Watched(parties)
    parties.align()
    points = [{each for _, points in run.clear() for each in points} for run in (first, second)]
    assert len(points[0]) == len(points[1]) == 2 * sum(map(len, parties.sets.values()))
    assert not points[0] & points[1]
    for name in parties.sets:
        for secret in ("secret", "seed", "name"):
            assert first.secrets[name][secret] != second.secrets[name][secret]
