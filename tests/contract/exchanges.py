"""The two transports that the contract is tested on, opened in one process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import grpc

from vfl.certs.authority import create_authority, issue
from vfl_common.bundle import Ledger, Link
from vfl_common.errors import InterruptedRun, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.rpc.ask import AnswerHeads
from vfl_common.rpc.channel import dial, run_server
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.link import ExchangeLink, LinkEnds
from vfl_common.rpc.exchange.memory import MemoryLink, MemoryPipe
from vfl_common.rpc.exchange.service import ExchangeService, FramePipe

T = TypeVar("T")
ACTIVE, PASSIVES = "active", ("north", "south")
# Of the recipe that the tests have in mind.
PHASES = ("train", "evaluate", "first", "second", "plain", "more")
# Bound of every wait; nothing should come near it.
WAIT_S = 20.0


def soon(call: Callable[..., T], *args: object) -> Future[T]:
    """``call`` with these arguments in a thread of its own; ask ``.result(WAIT_S)``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 - whoever asks gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class EndingLink(Link, Protocol):
    def end(self, error: VflError) -> None: ...


class Exchange(ABC):
    """One generation: a hub and a link for each passive party."""

    hub: ExchangeHub[Any]

    @abstractmethod
    def link(self, party: str) -> EndingLink: ...


class MemoryExchange(Exchange):
    def __init__(
        self, roster: Sequence[str], timeout_s: float, link_timeout_s: float, in_flight: int
    ) -> None:
        pipe = MemoryPipe(ACTIVE, roster, in_flight=in_flight)
        self.hub: ExchangeHub[Any] = ExchangeHub(pipe, timeout_s=timeout_s)
        self._links = {party: MemoryLink(pipe, party, timeout_s=link_timeout_s) for party in roster}

    def link(self, party: str) -> MemoryLink:
        return self._links[party]


@cache
def _certificates() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    create_authority(Path(folder.name), "contract")
    return folder


@cache
def keyring(name: str) -> Keyring:
    return Keyring(issue(Path(_certificates().name), name), name)


def credentials(name: str) -> Credentials:
    return keyring(name).current()


class GrpcExchange(Exchange):
    """Over loopback, with mutual TLS. ``raw`` opens a stream on which a test says what no link
    would say.
    """

    def __init__(
        self,
        roster: Sequence[str],
        timeout_s: float,
        attach_timeout_s: float = 2.0,
        link_timeout_s: float = WAIT_S,
        in_flight: int = 1,
        confer: AnswerHeads | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.roster, self.timeout_s, self.link_timeout_s = tuple(roster), timeout_s, link_timeout_s
        self.ledger, self.meter = Ledger(), TcpMeter()
        self.ledgers = {party: Ledger() for party in roster}
        self.service = ExchangeService(
            roster,
            keyring(ACTIVE),
            self.ledger,
            self.meter,
            phases=PHASES,
            attach_timeout_s=attach_timeout_s,
            confer=confer,
        )
        self._open = ExitStack()
        threads = 3 * len(roster) + 4
        _, self.address = self._open.enter_context(
            run_server("127.0.0.1:0", keyring(ACTIVE), [self.service], threads)
        )
        self.hub: ExchangeHub[FramePipe] = self.begin(1)
        self._links: dict[str, ExchangeLink] = {}

    def begin(self, generation: int) -> ExchangeHub[FramePipe]:
        """The next generation's hub."""
        pipe = FramePipe("run", generation, self.roster, in_flight=self.in_flight)
        self.hub = ExchangeHub(pipe, timeout_s=self.timeout_s)
        self.service.use(self.hub)
        return self.hub

    def link(self, party: str) -> ExchangeLink:
        if party not in self._links:
            self._links[party] = self.new_link(party, timeout_s=self.link_timeout_s)
        return self._links[party]

    def new_link(
        self,
        party: str,
        *,
        generation: int = 1,
        reconnect_s: float = 5.0,
        timeout_s: float = WAIT_S,
        address: str = "",
        identity: Credentials | None = None,
    ) -> ExchangeLink:
        link = ExchangeLink(
            lambda: dial(address or self.address, identity or credentials(party), ACTIVE),
            LinkEnds(party, ACTIVE, "run", generation),
            self.ledgers.setdefault(party, Ledger()),
            reconnect_s=reconnect_s,
            timeout_s=timeout_s,
        )
        self._open.callback(link.close)
        self._open.callback(link.end, InterruptedRun("the test is over"))
        return link

    def raw(self, party: str, requests: Iterator[bytes]) -> Any:
        """The replies, as bytes, to what ``requests`` gives."""
        channel = dial(self.address, credentials(party), ACTIVE)
        self._open.callback(channel.close)
        grpc.channel_ready_future(channel).result(timeout=WAIT_S)
        return channel.stream_stream("/vfl.v1.Exchange/Swap")(requests, timeout=WAIT_S)

    def close(self) -> None:
        self._open.close()


@contextmanager
def exchange(
    transport: str,
    roster: Sequence[str] = PASSIVES,
    timeout_s: float = WAIT_S,
    link_timeout_s: float = WAIT_S,
    in_flight: int = 1,
) -> Iterator[Exchange]:
    """``transport``: "memory" or "grpc"; how long a hub, and a link, waits for a living peer."""
    if transport == "memory":
        yield MemoryExchange(roster, timeout_s, link_timeout_s, in_flight)
        return
    found = GrpcExchange(roster, timeout_s, link_timeout_s=link_timeout_s, in_flight=in_flight)
    try:
        yield found
    finally:
        found.close()
