"""The Control service. A party has one stream, which carries its messages to the coordinator and
the answers back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError

from vfl_common.bundle import CONTROL, Ledger
from vfl_common.errors import Code, InternalError, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.ask import make_ask_method
from vfl_common.rpc.channel import CallLimit, Context, Handler, get_caller_name, stream_handler
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.guard import Refusals
from vfl_common.rpc.messages import to_failure
from vfl_common.rpc.uplink import SERVICE
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.membership import Member

# The seconds in which a party ends the session after it has read the server's last message.
_LAST_WORD_S = 1.5
# The maximum number of sessions of a party: one in use, one broken, and one that replaces them.
MAX_SESSIONS = 3

log = logging.getLogger(__name__)


class ControlService:
    """Admits callers by the name in their certificate; the coordinator decides everything else.

    ``show``: Reports refusals to the person who started the server.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        keyring: Keyring,
        ledger: Ledger,
        meter: TcpMeter,
        show: Callable[..., None] = lambda _event, **_facts: None,
    ) -> None:
        self._coordinator, self._keyring, self._ledger, self._meter = (
            coordinator,
            keyring,
            ledger,
            meter,
        )
        # Limits the sessions that are open or wait to open.
        self._places = CallLimit(MAX_SESSIONS, "sessions")
        self.refusals = Refusals(show)

    def handler(self) -> Handler:
        """Returns the gRPC handler of the service."""
        ask = make_ask_method(self._keyring, self._coordinator.require_place, self._coordinator.ask)
        return stream_handler(SERVICE, Session=self._session, Ask=ask)

    def _session(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        name = ""
        try:
            name = get_caller_name(context, self._keyring)
            with self._places.hold(name):
                member = self._coordinator.open(name)
                yield from self._serve_session(member, requests, context)
        except Exception as error:  # noqa: BLE001 - the peer gets only the public text
            name = name or (error.party if isinstance(error, PeerError) else "")
            self.refusals.note(name, error)
            if isinstance(error, PeerError):
                self._coordinator.note_refusal(name, error)
            yield control_pb2.ServerMessage(stop=to_failure(error)).SerializeToString()

    def _serve_session(
        self, member: Member, requests: Iterator[bytes], context: Context
    ) -> Iterator[bytes]:
        self._meter.name_caller(context.peer(), member.name)
        if not context.add_callback(lambda: self._coordinator.end_session(member)):
            self._coordinator.end_session(member)
            return
        thread_args = [member, requests, lambda: get_caller_name(context, self._keyring)]
        threading.Thread(
            target=self._read, args=thread_args, name=f"from-{member.name}", daemon=True
        ).start()
        last_message: control_pb2.ServerMessage | None = None
        while (message := member.outbox.get()) is not None:
            last_message, data = message, message.SerializeToString()
            self._ledger.add(member.name, CONTROL, CONTROL, "sent", 0, len(data))
            yield data
        if last_message is not None and _is_last_word(last_message):
            # If this process exits before the party has read the message, a message from the party
            # can break the connection. The party's channel then drops the unread message.
            member.hung_up.wait(_LAST_WORD_S)

    def _read(
        self, member: Member, requests: Iterator[bytes], admit: Callable[[], object] = lambda: None
    ) -> None:
        """Reads all messages of a party. Runs in the session's second thread.

        ``admit``: Raises PeerError if the party's certificate has been revoked since the session
        began. Then the party may neither join again nor end the run. The other parties wait, and
        the party may return with another certificate.
        """
        try:
            for data in requests:
                self._ledger.add(member.name, CONTROL, CONTROL, "received", 0, len(data))
                message = _parse(data, member.name)
                if message.WhichOneof("body") in ("join", "abort"):
                    admit()
                self._handle(member, message)
        except VflError as error:
            # Only this party is refused. The other parties keep waiting.
            if isinstance(error, PeerError):
                self.refusals.note(member.name, error)
                self._coordinator.note_refusal(member.name, error)
            member.outbox.put(control_pb2.ServerMessage(stop=to_failure(error)))
            member.outbox.put(None)
        except Exception:  # noqa: BLE001 - gRPC raises a bare Exception if the stream breaks; `closed` handles it
            return
        finally:
            member.hung_up.set()

    def _handle(self, member: Member, message: control_pb2.PartyMessage) -> None:
        """Passes a message to the coordinator. Raises PeerError. Logs an unexpected error and
        raises it as InternalError.
        """
        try:
            self._coordinator.handle(member, message)
        except VflError:
            raise
        except Exception as error:
            log.exception("internal error", extra={"event": "failed"})
            raise InternalError(f"{type(error).__name__}: {error}") from None


def _is_last_word(message: control_pb2.ServerMessage) -> bool:
    """Returns whether the party ends the session once it has read ``message``."""
    body = message.WhichOneof("body")
    return body in ("stop", "complete") or (body == "interrupt" and message.interrupt.leaving)


def _parse(data: bytes, party: str) -> control_pb2.PartyMessage:
    try:
        return control_pb2.PartyMessage.FromString(data)
    except DecodeError:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{party} sent bytes that are not a control message",
            party=party,
        ) from None
