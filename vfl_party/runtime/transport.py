"""Connects a party to its peers over gRPC: listens at the active party, and makes each generation's
links and hub.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from vfl_common.bundle import PROTOCOL, Hub, Ledger, Link
from vfl_common.errors import (
    Code,
    InternalError,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
    is_stop,
)
from vfl_common.identity.diagnose import diagnose
from vfl_common.process.logs import Console
from vfl_common.rpc.ask import MAX_CONFERRING, MAX_QUESTIONS, LogHeads
from vfl_common.rpc.channel import dial, run_server
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.link import ExchangeLink, LinkEnds
from vfl_common.rpc.exchange.service import MAX_STREAMS, ExchangeService, FramePipe
from vfl_common.rpc.exchange.service import SERVICE as EXCHANGE
from vfl_common.rpc.health import MAX_CHECKS, Health
from vfl_common.rpc.messages import Joining, Start
from vfl_common.stages import Job
from vfl_common.text import host_and_port
from vfl_party.assembly.files import PartyFiles
from vfl_party.base.step_timing import Clock
from vfl_party.record.heads import HeadExchange
from vfl_party.record.recorder import LeaveCheck, RecordedRun, Recorder

log = logging.getLogger(__name__)

# The seconds in which the passive parties end their streams.
_CLOSE_S = 5.0
_DIAGNOSIS_S = 2.0
# The seconds in which all passive parties open their streams, before missing parties are reported.
_ARRIVAL_S = 10.0
# The oldest protocol version in which parties exchange the heads of their records.
_RECORDS_PROTOCOL = 8


@dataclass
class GrpcTransport:
    """One generation's connections over gRPC. Implements
    ``vfl_party.runtime.generation.Transport``.
    """

    me: str
    service: ExchangeService | None
    meter: TcpMeter
    hub: Hub | None = None
    link: Link | None = None
    server: Link | None = None
    grpc_hub: ExchangeHub[FramePipe] | None = None
    grpc_links: Sequence[ExchangeLink] = ()
    roll_call: threading.Timer | None = None
    clock: Clock = field(default_factory=Clock)
    protocol: int = PROTOCOL
    record: Recorder | None = None
    conferring: ExchangeLink | None = None

    def confer(self, *, once: bool = False) -> None:
        """Exchanges the heads of the records with the active party. ``once``: Whether to try only
        once, and only if the record has new entries.
        """
        link, record = self.conferring, self.record
        if link is None or record is None or (once and not record.heads.has_news):
            return

        def ask(shows: LogHeads) -> LogHeads:
            answer = link.confer(shows.encode(), once=once)
            if answer is None and not once:
                raise PeerError(
                    Code.PROTOCOL_DIFFERS,
                    f"{link.peer} has no record of the data that it sends. Install the same "
                    "version.",
                    party=link.peer,
                )
            if answer is None:
                raise LostError(Code.PARTY_LOST, f"{link.peer} does not answer", party=link.peer)
            return LogHeads.decode(answer, party=link.peer, me=self.me)

        try:
            record.heads.confer(link.peer, ask)
        except LostError as error:
            if not once:
                raise
            log.info(
                "the peer did not sign the head of the record (%s); the next run asks again",
                error,
                extra={"event": "record"},
            )

    def end(self, error: VflError) -> None:
        """Ends the hub and the links with an error."""
        if self.grpc_hub is not None:
            self.grpc_hub.end(error)
        for link in self.grpc_links:
            link.end(error)

    def _to_peer_error(self, error: BaseException) -> VflError:
        """Returns the error that is sent to the peers. If this party was stopped, it is an
        InterruptedRun, so that the peers wait for the party.
        """
        if is_stop(error):
            return InterruptedRun(f"{self.me} was stopped")
        return error if isinstance(error, VflError) else InternalError(str(error))

    def close(self, error: BaseException | None) -> None:
        """Closes the hub and the links. ``error``: The error with which the generation failed; None
        if it succeeded.
        """
        if self.roll_call is not None:
            self.roll_call.cancel()
        if self.grpc_hub is not None and error is None:
            self.grpc_hub.pipe.wait_for_late()
        if self.service is not None and error is None:
            self.service.wait_until_idle(_CLOSE_S)
        # The kernel's byte counts must be read before the sockets are closed.
        self.meter.sample()
        if self.service is not None and error is not None:
            self.service.use(None)
        if error is not None:
            self.end(self._to_peer_error(error))
        for link in self.grpc_links:
            link.close()


@dataclass
class Transports:
    """Makes this party's transports, one for each generation.

    Args:
        files: The party file and the files that it names.
        console: Reports missing parties to the user.
        joining: This party's Join message. With it, the active party checks whether a passive party
            fits.
        heads: The exchange of the heads of this party's record.
        job: The job of the run.
        allows: See ``Recorder``.
    """

    files: PartyFiles
    console: Console
    ledger: Ledger
    meter: TcpMeter
    joining: Joining | None = None
    heads: HeadExchange | None = None
    job: Job = "train"
    allows: Sequence[LeaveCheck] = ()

    def close(self) -> None:
        """Signs the head of the record, and closes the record."""
        if self.heads is None:
            return
        try:
            self.heads.seal()
        except VflError as error:
            # Raising here would hide the error with which the program ends.
            log.warning("%s", error, extra={"event": "record"})
        self.heads.book.close()

    @contextlib.contextmanager
    def listening(self) -> Iterator[tuple[ExchangeService | None, str]]:
        """Listens at the active party, and yields the exchange service and its address. Yields
        (None, '') at a passive party.
        """
        if not self.files.is_active:
            yield None, ""
            return
        recipe = self.files.recipe
        roster = [party.name for party in recipe.passives]
        service = ExchangeService(
            roster,
            self.files.keyring,
            self.ledger,
            self.meter,
            phases=[phase.name for phase in recipe.phases],
            attach_timeout_s=recipe.run.rejoin_deadline_s,
            joining=self.joining,
            confer=self.heads.answer if self.heads is not None else None,
        )
        health = Health(
            {EXCHANGE: lambda: True},
            self.files.keyring,
            may_ask=[self.files.name, recipe.server, *roster],
        )
        # The number of threads for each passive party. The server's and this party's own probes
        # also need threads for health checks. Four more threads refuse other callers.
        per_party = MAX_STREAMS + MAX_QUESTIONS + MAX_CHECKS + MAX_CONFERRING
        threads = per_party * len(roster) + 2 * MAX_CHECKS + 4
        with run_server(self.files.file.listen, self.files.keyring, [service, health], threads) as (
            _,
            address,
        ):
            more = {"host": self._find_host()} if address.startswith("0.0.0.0:") else {}
            self.console.emit("ready", name=self.files.name, address=address, **more)
            try:
                yield service, address
            finally:
                service.close()

    def _find_host(self) -> str:
        """Returns this machine's address on the way to the server."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            # This sends nothing.
            sock.connect(host_and_port(self.files.file.server))
            return str(sock.getsockname()[0])

    def make_transport(
        self, service: ExchangeService | None, start: Start, clock: Clock
    ) -> GrpcTransport:
        """Makes a generation's links, and the hub at the active party. Connections open with the
        first bundle. ``clock``: The party's clock.

        Raises PeerError if neither the server nor the party file names an address of the active
        party.
        """
        files, recipe = self.files, self.files.recipe
        files.keyring.tell()
        # The server waits the whole step timeout for a late party and then reports it. This party
        # waits longer, so that it receives that report.
        patience_s = 2 * recipe.run.step_timeout_s
        server = self._make_link(files.file.server, recipe.server, start, patience_s)
        if service is not None:
            roster = [party.name for party in recipe.passives if party.name not in start.left]
            pipe = FramePipe(
                start.run_id,
                start.generation,
                roster,
                in_flight=files.course.in_flight,
                protocol=start.protocol,
                allocate=self._allocate,
            )
            hub = ExchangeHub(pipe, timeout_s=recipe.run.step_timeout_s)
            service.use(hub)
            roll_call = self._start_roll_call(pipe)
            return GrpcTransport(
                files.name,
                service,
                self.meter,
                hub=hub,
                server=server,
                grpc_hub=hub,
                grpc_links=[server],
                roll_call=roll_call,
                clock=clock,
                protocol=start.protocol,
                record=self._make_recorder(start, roster),
            )
        address, peer = files.file.active or start.exchange_address, recipe.active.name
        if not address:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"the server reports no address of {peer}. Set 'active' in the party file.",
                party=recipe.server,
            )
        self.meter.name_address(address, peer)
        link = self._make_link(address, peer, start, recipe.run.step_timeout_s)
        links = [link, server]
        return GrpcTransport(
            files.name,
            None,
            self.meter,
            link=link,
            server=server,
            grpc_links=links,
            clock=clock,
            protocol=start.protocol,
            record=self._make_recorder(start, [peer]),
            conferring=link if start.protocol >= _RECORDS_PROTOCOL else None,
        )

    def _make_recorder(self, start: Start, peers: Sequence[str]) -> Recorder | None:
        """Makes the recorder of a generation in the party's record; None without a record."""
        heads, files = self.heads, self.files
        if heads is None:
            return None
        return Recorder(
            heads.book,
            heads,
            RecordedRun(start.run_id, start.generation, self.job, files.recipe.digest()),
            keys=files.file.pins,
            asks_for=peers if start.protocol >= _RECORDS_PROTOCOL else (),
            whole=files.file.record.digest == "whole",
            allows=self.allows,
        )

    def _start_roll_call(self, pipe: FramePipe) -> threading.Timer:
        """Starts a timer that reports missing passive parties after ``_ARRIVAL_S``. Only the
        passive parties know why they are missing.
        """
        left_s = max(0.0, self.files.recipe.run.rejoin_deadline_s - _ARRIVAL_S)

        def report_missing() -> None:
            if pipe.absent:
                self.report_waiting(pipe.absent, left_s)

        timer = threading.Timer(_ARRIVAL_S, report_missing)
        timer.daemon = True
        timer.start()
        return timer

    def report_waiting(self, missing: Sequence[str], left_s: float, why: str = "") -> None:
        """Reports to the user which parties are missing, and for how long the run still waits."""
        because = {"why": why} if why else {}
        self.console.emit("waiting", missing=list(missing), left_s=round(left_s, 1), **because)

    @property
    def _allocate(self) -> Callable[[int], memoryview] | None:
        return allocate_pinned if self.files.device.type == "cuda" else None

    def _make_link(self, address: str, peer: str, start: Start, timeout_s: float) -> ExchangeLink:
        """Makes this generation's link to ``peer``. The connection opens with the first bundle."""
        files = self.files
        return ExchangeLink(
            lambda: dial(address, files.keyring.current(), peer),
            LinkEnds(files.name, peer, start.run_id, start.generation, start.protocol),
            self.ledger,
            reconnect_s=files.recipe.run.rejoin_deadline_s,
            timeout_s=timeout_s,
            allocate=self._allocate,
            explain=lambda: str(diagnose(address, files.keyring.current(), peer, _DIAGNOSIS_S)),
            on_waiting=lambda left_s, why: self.report_waiting([peer], left_s, why),
        )


def allocate_pinned(nbytes: int) -> memoryview:
    """Allocates a writable buffer in page-locked memory, from which a GPU copies directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
