"""Private alignment among threads. All that a party or the server sends passes one function, which
may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tests.harness import cases
from vfl_common.bundle import PROTOCOL, Buffer, Bundle, BundleSpec, Hub, Link, StepKey
from vfl_common.config.base import parse
from vfl_common.config.data import KeyColumns
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InternalError, InterruptedRun, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.psi import MAX_ROWS
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryLink, MemoryPipe
from vfl_party.align import batches, digest, rounds
from vfl_party.align.aligned import AlignedRows, AlignmentContext
from vfl_party.align.psi import PsiAlignment
from vfl_party.base.step_timing import Clock
from vfl_party.data import Table
from vfl_party.outbound.policies import AllowAll
from vfl_party.psi import curve
from vfl_server.intersection import alignment_service

# Nothing should come near it.
WAIT_S = 60.0
SERVER = "server"
# (sender, receiver, step, what it sends) -> what it sends instead.
Tap = Callable[[str, str, StepKey, Bundle], Bundle]


def names_of(parties: int) -> list[str]:
    """Returns the parties' names, in the order of the ring; the first one is the active party."""
    return [f"p{number}" for number in range(parties)]


def sets_of(*sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns {party: its ids}."""
    return {name: tuple(sorted(each)) for name, each in zip(names_of(len(sets)), sets, strict=True)}


def in_common(sets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns the plain intersection, in canonical order."""
    return tuple(sorted(set.intersection(*map(set, sets.values()))))


class Direct:
    """Does what ``vfl_party.psi.pool.Masking`` does, in the thread that asks; counts all
    batches.
    """

    batches = 0

    def __init__(self, secret: bytes, salt: bytes, _workers: int) -> None:
        self._secret, self._salt = secret, salt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def mask_own(self, ids: Sequence[str]) -> Future[bytes]:
        return self._done(lambda: curve.hash_ids([each.encode() for each in ids], self._salt))

    def mask_received(self, points: bytes, party: str) -> Future[bytes]:
        def checked() -> bytes:
            curve.check_points(points, party)
            return points

        return self._done(checked)

    def _done(self, points: Callable[[], bytes]) -> Future[bytes]:
        Direct.batches += 1
        future: Future[bytes] = Future()
        try:
            future.set_result(curve.mask(points(), self._secret))
        except VflError as error:
            future.set_exception(error)
        return future


def small_batches(rows: int = 16) -> Any:
    """Makes a module's fixture: batches of few rows, masked without processes, and digests that
    cost nothing.
    """

    @pytest.fixture(scope="module", autouse=True)
    def small() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "BATCH", rows)
            patch.setattr(rounds, "Masking", Direct)
            patch.setitem(digest._SCRYPT, "n", 2)
            yield

    return small


@dataclass(frozen=True)
class Said:
    """What one party has sent another at a step: the bytes of each tensor."""

    sender: str
    receiver: str
    step: StepKey
    tensors: Mapping[str, bytes]


class Recorder:
    """A tap that changes nothing."""

    def __init__(self) -> None:
        self.said: list[Said] = []

    def __call__(self, sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        tensors = {name: bytes(buffer.data) for name, buffer in bundle.tensors.items()}
        self.said.append(Said(sender, receiver, step, tensors))
        return bundle


def changed(bundle: Bundle, name: str, data: bytes) -> Bundle:
    """Returns the bundle with other bytes in one tensor, which becomes flat if there are more or
    fewer.
    """
    was = bundle.tensors[name]
    shape = was.shape if len(data) == was.data.nbytes else (len(data),)
    return Bundle(bundle.kind, {**bundle.tensors, name: Buffer(was.dtype, shape, memoryview(data))})


@dataclass
class Parties:
    """The parties of one run, and what they keep in ``folder``; ``align`` may be called again and
    again.
    """

    folder: Path
    sets: dict[str, tuple[str, ...]]
    run_id: str = "run"
    # Of the recipe.
    rows: dict[str, Any] = field(default_factory=dict)
    # Of each party's table, with ``rows["keys"]``.
    key_columns: KeyColumns | None = None
    credentials: Callable[[str], Credentials] | None = None
    tap: Tap = lambda _sender, _receiver, _step, bundle: bundle
    # Parties that have left the run.
    left: frozenset[str] = frozenset()
    # Of a party, at the server.
    rows_at_most: int = MAX_ROWS
    # False: the rows are to be predicted.
    divides: bool = True
    # {party: what it gives ``AlignmentContext``}.
    asks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def folder_of(self, name: str) -> Path:
        return self.folder / self.run_id / name

    @property
    def recipe(self) -> Recipe:
        tables = cases.recipe(
            len(self.sets), task={"kind": "binary"}, rows={"align": "psi", **self.rows}
        )
        return parse(Recipe, tables, "recipe")

    def _aligning(self, name: str, connections: _Connections) -> AlignmentContext:
        ids = self.sets[name]
        table = Table(
            f"{name}.csv",
            ids,
            labels=np.zeros(len(ids)) if name == next(iter(self.sets)) else None,
            key_columns=self.key_columns,
        )
        mine = self.credentials(name) if self.credentials is not None else None
        given = self.asks.get(name, {})
        return AlignmentContext(
            name, self.run_id, table, self.folder_of(name), connections, credentials=mine, **given
        )

    def kept(self, name: str) -> AlignedRows:
        """Returns what a party gets that comes back to a run under way."""
        return PsiAlignment(self.recipe, AllowAll()).get_agreed(
            self._aligning(name, _Connections())
        )

    def align(self) -> dict[str, AlignedRows]:
        """Returns what each party gets. Raises the first error."""
        found, errors = self.outcomes()
        for error in errors:
            raise error
        return found

    def outcomes(self) -> tuple[dict[str, AlignedRows], list[BaseException]]:
        """Returns what the parties get that get anything; and all errors, the first one first."""
        recipe = self.recipe
        ring = [name for name in self.sets if name not in self.left]
        hub = ExchangeHub(MemoryPipe(ring[0], ring[1:]), timeout_s=WAIT_S)
        server = ExchangeHub(MemoryPipe(SERVER, ring), timeout_s=WAIT_S)
        errors: list[BaseException] = []

        def guarded(act: Callable[[], AlignedRows | None]) -> AlignedRows | None:
            try:
                return act()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)
                for each in (hub, server):
                    each.end(error if isinstance(error, VflError) else InternalError(repr(error)))
                return None

        def take_part(name: str) -> AlignedRows:
            to_server = _Link(
                MemoryLink(server.pipe, name, timeout_s=WAIT_S), name, SERVER, self.tap
            )
            connections = _Connections(hub=_Hub(hub, name, self.tap), server=to_server)
            if name != ring[0]:
                link = MemoryLink(hub.pipe, name, timeout_s=WAIT_S)
                connections = _Connections(
                    link=_Link(link, name, ring[0], self.tap), server=to_server
                )
            self.folder_of(name).mkdir(parents=True, exist_ok=True)
            return PsiAlignment(recipe, AllowAll(), divides=self.divides).align(
                self._aligning(name, connections)
            )

        def answer() -> None:
            service = alignment_service(
                recipe, self.folder_of(SERVER), trains=self.divides, max_rows=self.rows_at_most
            )
            assert service is not None
            service(_Hub(server, SERVER, self.tap))()

        with ThreadPoolExecutor(len(ring) + 1) as threads:
            serving = threads.submit(guarded, answer)
            futures = {name: threads.submit(guarded, partial(take_part, name)) for name in ring}
            found = {name: each.result(WAIT_S) for name, each in futures.items()}
            if not errors:
                # If all knew the rows, nobody has asked it.
                server.end(_OVER)
            serving.result(WAIT_S)
        return {name: each for name, each in found.items() if each is not None}, [
            e for e in errors if e is not _OVER
        ]


_OVER = InterruptedRun("the test is over")


@dataclass
class _Connections:
    link: Link | None = None
    hub: Hub | None = None
    server: Link | None = None
    clock: Clock = field(default_factory=Clock)
    record: None = None
    protocol: int = PROTOCOL


class _Link(Link):
    def __init__(self, inner: MemoryLink, me: str, peer: str, tap: Tap) -> None:
        self._inner, self._me, self._peer, self._tap = inner, me, peer, tap

    def send(self, step: StepKey, bundle: Bundle) -> None:
        self._inner.send(step, self._tap(self._me, self._peer, step, bundle))

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        return self._inner.receive(step, expect)

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        self.send(step, bundle)
        return self.receive(step, expect)

    def unhurried(self) -> None:
        self._inner.unhurried()


class _Hub(Hub):
    def __init__(self, inner: ExchangeHub[MemoryPipe], me: str, tap: Tap) -> None:
        self._inner, self._me, self._tap = inner, me, tap

    def collect(self, step: StepKey, *args: Any, **named: Any) -> dict[str, Bundle]:
        return self._inner.collect(step, *args, **named)

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        tapped = {
            party: self._tap(self._me, party, step, bundle) for party, bundle in replies.items()
        }
        self._inner.reply(step, tapped)

    def ask_again(self, step: StepKey) -> None:
        self._inner.ask_again(step)

    def settle(self) -> None:
        self._inner.settle()

    def unhurried(self) -> None:
        self._inner.unhurried()
