"""The gRPC side of an exchange: admits parties and moves frames between their streams and the
current hub.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc

from vfl_common.bundle import StepKey
from vfl_common.config.recipe import RESERVED_PHASES
from vfl_common.errors import Code, InternalError, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.link import OLDEST, PROTOCOL
from vfl_common.pb.vfl.v1 import control_pb2, exchange_pb2
from vfl_common.rpc.agreement import require_alike
from vfl_common.rpc.ask import answering
from vfl_common.rpc.channel import Context, Handler, caller, stream_handler
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.guard.refusals import Refusals
from vfl_common.rpc.hub import ExchangeHub, PartyStream
from vfl_common.rpc.messages import Joining, join_message
from vfl_common.wire.frames import label, malformed, parse_frame

SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Exchange"].full_name
# A phase that no recipe of this run has.
_UNKNOWN = "unknown"
# For each party: the one in use, and others that are ending or beginning.
MAX_STREAMS = 3

log = logging.getLogger(__name__)


class ExchangeService:
    """The gRPC side: admits parties of ``roster`` and moves frames between their streams and the
    current hub.

    ``phases``: those of the recipe. Bytes of any other phase are counted as those of one,
    ``unknown``: a peer's words must not make the ledger grow. ``joining``: what this party says
    when it joins, to answer whether a caller fits it; None: nobody may ask.
    """

    def __init__(
        self,
        roster: Sequence[str],
        keyring: Keyring,
        ledger: Ledger,
        meter: TcpMeter,
        *,
        phases: Collection[str],
        attach_timeout_s: float,
        joining: Joining | None = None,
    ) -> None:
        self._joining = joining
        self._roster, self._keyring = frozenset(roster), keyring
        self._phases = RESERVED_PHASES.union(phases)
        self._ledger, self._meter = ledger, meter
        self._attach_timeout_s = attach_timeout_s
        self._changed = threading.Condition()
        self._hub: ExchangeHub | None = None
        # Streams that have attached.
        self._open = 0
        # Streams of each party, attached or not.
        self._held: Counter[str] = Counter()
        self._closed = False
        self.refusals = Refusals()

    def handler(self) -> Handler:
        asks = (
            {"Ask": answering(self._keyring, self._require_place, self._ask)}
            if self._joining is not None
            else {}
        )
        return stream_handler(SERVICE, Swap=self._swap, **asks)

    def _ask(self, party: str, join: control_pb2.Join) -> None:
        """Returns if a party fits this one: protocol, recipe and plug-ins. Raises PeerError."""
        if self._joining is not None:
            require_alike(party, join, self._keyring.name, join_message(self._joining).join)

    def use(self, hub: ExchangeHub | None) -> None:
        """Makes ``hub`` the one that streams attach to from now on."""
        with self._changed:
            self._hub = hub
            self._changed.notify_all()

    def close(self) -> None:
        """Refuses streams that wait for a hub from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def awaited(self) -> list[str]:
        """The parties whose part of the current step the hub is waiting for."""
        hub = self._hub
        return [] if hub is None else hub.awaited

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits until no stream is open, at most ``timeout_s``: the parties close theirs after the
        last reply.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, timeout=timeout_s)

    def _swap(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        gone = threading.Event()

        def leave() -> None:
            gone.set()
            with self._changed:
                self._changed.notify_all()

        if not context.add_callback(leave):
            # The stream has ended already.
            return
        # Once the stream has attached.
        hub: ExchangeHub | None = None
        try:
            with self._admitted(context) as party:
                self._meter.name_caller(context.peer(), party)
                hub, resume = self._attach(requests, party, gone)
                stream = hub.open(party)
                # Otherwise the stream has ended already.
                if context.add_callback(stream.close):
                    yield from self._until_it_ends(hub, stream, requests, resume)
        except Exception as error:  # noqa: BLE001 - whatever happens, the peer learns only the public text
            if isinstance(error, PeerError) and hub is None and not error.retryable:
                self.refusals.note(error.party, error)
            # gRPC raises the latter if the stream breaks.
            if not isinstance(error, VflError | grpc.RpcError):
                self._failed(hub or self._hub, error)
            yield exchange_pb2.Frame(failure=to_failure(error)).SerializeToString()

    def _failed(self, hub: ExchangeHub | None, error: Exception) -> None:
        """Logs a defect of ours, and ends the generation: without this stream it would wait for its
        party in vain.
        """
        log.exception("internal error", extra={"event": "failed"})
        if hub is not None:
            hub.end(InternalError(f"{type(error).__name__}: {error}"))

    @contextmanager
    def _admitted(self, context: Context) -> Iterator[str]:
        """Yields the caller's name, while its stream lasts.

        Raises PeerError if its certificate is revoked, if it has no part in this exchange, or if it
        holds too many streams already: each takes a thread.
        """
        party = caller(context, self._keyring)
        self._require_place(party)
        with self._changed:
            if self._held[party] >= MAX_STREAMS:
                raise PeerError(
                    Code.NAME_TAKEN, f"{party} holds {MAX_STREAMS} streams already", party=party
                )
            self._held[party] += 1
        try:
            yield party
        finally:
            with self._changed:
                self._held[party] -= 1

    def _require_place(self, party: str) -> None:
        if party not in self._roster:
            text = f"{party} has no part in this exchange"
            raise PeerError(Code.ROLE_MISMATCH, text, party=party)

    def _until_it_ends(
        self,
        hub: ExchangeHub,
        stream: PartyStream,
        requests: Iterator[bytes],
        resume: StepKey | None,
    ) -> Iterator[bytes]:
        with self._changed:
            self._open += 1
        try:
            yield from self._serve(hub, stream, requests, resume)
        except PeerError as error:
            # A party of this run that breaks the protocol ends it.
            hub.end(error)
            raise
        finally:
            # The party closes its connection once the stream has ended.
            self._meter.sample()
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _attach(
        self, requests: Iterator[bytes], party: str, gone: threading.Event
    ) -> tuple[ExchangeHub, StepKey | None]:
        """Returns the hub that the party asks for, and the step that it wants to resume, if any.

        ``gone``: set once the stream has ended, so that a caller that has left keeps no place and
        no thread.
        """
        data = next(requests, b"")
        frame = parse_frame(data, party=party).envelope
        if not frame.HasField("attach"):
            raise malformed(f"{party} opened a stream without attaching", party)
        attach = frame.attach
        self._ledger.add(party, CONTROL, CONTROL, "received", 0, len(data))
        if not OLDEST <= attach.protocol <= PROTOCOL:
            text = f"{party} speaks protocol {attach.protocol}, this party {OLDEST} and {PROTOCOL}"
            raise PeerError(Code.PROTOCOL_DIFFERS, f"{text}; install the same version", party=party)

        def settled() -> bool:
            return (
                self._closed
                or gone.is_set()
                or (self._hub is not None and self._hub.generation >= attach.generation)
            )

        # A party may learn of a new generation a little earlier than we do.
        with self._changed:
            self._changed.wait_for(settled, timeout=self._attach_timeout_s)
            hub = self._hub
        if hub is None or (hub.run_id, hub.generation) != (attach.run_id, attach.generation):
            raise PeerError(
                Code.STALE_GENERATION, f"{party} attached to another generation", party=party
            )
        if hub.protocol not in (0, attach.protocol):
            text = (
                f"{party} attached with protocol {attach.protocol}; all have agreed on "
                f"{hub.protocol}"
            )
            raise PeerError(Code.PROTOCOL_DIFFERS, text, party=party)
        resume = attach.resume
        return hub, StepKey(resume.phase, resume.round, resume.batch) if attach.HasField(
            "resume"
        ) else None

    def _serve(
        self,
        hub: ExchangeHub,
        stream: PartyStream,
        requests: Iterator[bytes],
        resume: StepKey | None,
    ) -> Iterator[bytes]:
        add, party, whole = self._ledger.add, stream.party, False
        if resume is not None:
            found = hub.resume(stream, resume)
            whole, data = found.whole, exchange_pb2.Frame(resume=found).SerializeToString()
            add(party, CONTROL, CONTROL, "sent", 0, len(data))
            yield data
        ahead = hub.in_flight > 1
        # While a reply is computed, the next bundles are read.
        if ahead:
            reader = threading.Thread(
                target=self._read,
                args=(hub, stream, requests),
                name=f"bundles-{party}",
                daemon=True,
            )
            reader.start()
        while ahead or whole or self._bundle(hub, stream, requests):
            whole = False
            reply = stream.outbox.get()
            if reply is None:
                return
            if isinstance(reply, Exception):
                raise reply
            for encoded in reply:
                add(
                    party,
                    encoded.phase,
                    encoded.kind,
                    "sent",
                    encoded.payload_bytes,
                    len(encoded.data),
                )
                yield encoded.data

    def _read(self, hub: ExchangeHub, stream: PartyStream, requests: Iterator[bytes]) -> None:
        """Passes on all bundles of a stream; what goes wrong is raised where the replies are
        sent.
        """
        try:
            while self._bundle(hub, stream, requests):
                pass
            stream.outbox.put(None)
        except Exception as error:  # noqa: BLE001 - whoever sends the replies knows what to do with it
            stream.outbox.put(error)

    def _bundle(self, hub: ExchangeHub, stream: PartyStream, requests: Iterator[bytes]) -> bool:
        """Passes on one bundle, or the rest of one; returns false if the party has closed its
        side.
        """
        party = stream.party
        phase, kind = (
            (stream.incoming.step.phase, stream.incoming.kind)
            if stream.incoming is not None
            else ("", "")
        )
        for data in requests:
            frame = parse_frame(data, party=party)
            envelope = frame.envelope
            if envelope.HasField("header"):
                phase, kind = envelope.step.phase, label(envelope)
            known = phase if phase in self._phases else _UNKNOWN
            self._ledger.add(party, known, kind, "received", frame.data.nbytes, len(data))
            hub.deliver(stream, frame)
            if envelope.last or not stream.outbox.empty():
                return True
        return False
