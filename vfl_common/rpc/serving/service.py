"""The active party's side of serving: admits the passive parties' streams, and sends questions to
all of them at once. If it serves several runs, each stream goes to the service of its run.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import grpc
from google.protobuf.message import DecodeError

from vfl_common.bundle import CONTROL, OLDEST, PROTOCOL, Ledger
from vfl_common.errors import Code, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.process.logs import LogOnce
from vfl_common.rpc.channel import CallLimit, Context, Handler, get_caller_name, stream_handler
from vfl_common.rpc.messages import from_failure, to_failure
from vfl_common.rpc.serving.stream import (
    ANSWER,
    PHASE,
    QUESTION,
    Absent,
    CachePolicy,
    Question,
    RecordMessage,
    ServingAnswer,
    Step,
    Stream,
    describe_question,
    encode_question,
    read_answer,
    read_cache_policy,
)
from vfl_common.text import clean, list_names

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["Serving"].full_name
# The maximum number of streams of one party: one in use, and others that are ending or beginning.
MAX_STREAMS = 3
# The time between two checks of the certificate of a stream.
CHECK_S = 5.0
# The maximum length of the random text that identifies a party's program.
_MAX_PROGRAM_CHARS = 64

log = logging.getLogger(__name__)


class ServingService:
    """Sends questions to the passive parties of one trained model.

    Args:
        widths: {passive party: the width of its embeddings}.
        run_id, digest: The id of the model's run and the digest of its recipe. A party that serves
            another run or recipe is refused.
        attends: Called with a party's name and True when the party has connected, and False when it
            has left.
        writes: Records a question before it is sent.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        keyring: Keyring,
        ledger: Ledger,
        *,
        run_id: str,
        digest: str,
        attends: Callable[[str, bool], None],
        writes: RecordMessage | None = None,
    ) -> None:
        self._widths, self._keyring, self._ledger = dict(widths), keyring, ledger
        self._run_id, self._digest, self._attends = run_id, digest, attends
        self._writes = writes
        self._log_once = LogOnce(log)
        self._changed = threading.Condition()
        self._streams: dict[str, Stream] = {}
        self._num_streams: Counter[str] = Counter()
        self._number = 0
        self._closed = False

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        return stream_handler(SERVICE, Attend=self.attend)

    @property
    def present(self) -> list[str]:
        """The parties that are connected and not away, in the recipe's order."""
        with self._changed:
            streams = self._streams
            return [n for n in self._widths if n in streams and streams[n].patience.waits]

    def close(self) -> None:
        """Ends all streams."""
        with self._changed:
            self._closed = True
            for stream in self._streams.values():
                stream.outbox.put(None)

    # -- the asking thread
    # ----------------------------------------------------------------------

    def keeping(self) -> dict[str, CachePolicy]:
        """Returns {connected party: permission to cache its embeddings}."""
        with self._changed:
            return {name: stream.keeping for name, stream in self._streams.items()}

    def ask(
        self,
        ids: Sequence[str],
        timeout_s: float,
        steps: Mapping[str, Step] | None = None,
        ids_of: Mapping[str, Sequence[str]] | None = None,
    ) -> Pending:
        """Sends a question about ``ids`` to all connected parties. Does not wait for answers.

        A party that has not answered after ``timeout_s`` is late. A party that has missed several
        questions is away until it answers a question in time: see ``AnswerPatience``. ``steps``:
        {party: question of the method}, instead of a question for embeddings; other parties get no
        question. ``ids_of``: {party: ids in its question}, for parties that do not get all ids. A
        party with an empty list counts as having answered.

        Raises VflError if a question may not be sent.
        """
        now_s = time.monotonic()
        ids_by_party = {
            name: (ids_of or {}).get(name, ids)
            for name in (self._widths if steps is None else steps)
        }
        question = Question(ids_by_party, now_s, steps)
        left_ms = max(1, int(1000 * timeout_s))
        with self._changed:
            self._number += 1
            number = self._number
            # Without steps, all parties that are asked about all ids get the same bytes.
            shared_data = encode_question(number, ids, left_ms, None) if steps is None else b""
            for name, party_ids in ids_by_party.items():
                stream = self._streams.get(name)
                if stream is None or stream.full:
                    question.results[name] = "away" if stream is None else "late"
                    continue
                if not stream.patience.waits:
                    question.results[name] = "away"
                    if not stream.patience.probes(number, now_s, now_s + timeout_s):
                        continue
                    # A probe must ask for at least one id.
                    party_ids = party_ids or ids
                elif not party_ids:
                    question.results[name] = ServingAnswer(b"")
                    continue
                step = steps[name] if steps is not None else None
                is_shared = party_ids is ids and step is None
                data = (
                    shared_data if is_shared else encode_question(number, party_ids, left_ms, step)
                )
                if self._writes is not None:
                    self._writes(describe_question(name, number, party_ids, step, len(data)))
                if name not in question.results:
                    stream.open[number] = question
                    question.waiting.add(name)
                stream.outbox.put(data)
        return Pending(self, number, question, now_s + timeout_s)

    def wait(
        self, number: int, question: Question, until_s: float
    ) -> dict[str, ServingAnswer | Absent]:
        """Waits for the answers until ``until_s`` (monotonic). Returns {party: its answer, or the
        reason why there is none}.
        """
        with self._changed:
            while question.waiting and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            for name in question.waiting:
                question.results[name] = "late"
                self._note_late(self._streams.get(name), number, question.asked_s)
            question.waiting = set()
            return {
                name: question.results[name] for name in self._widths if name in question.results
            }

    def _note_late(self, stream: Stream | None, number: int, asked_s: float) -> None:
        # A newer stream of the party does not have this question.
        if stream is None or stream.open.pop(number, None) is None:
            return
        if stream.patience.note_late(asked_s, len(stream.open)):
            log.warning(
                "%s does not answer; it is away until it answers a question in time",
                stream.party,
                extra={"event": "away"},
            )
            self._mark_away(stream)

    # -- gRPC's threads
    # ----------------------------------------------------------------------

    def attend(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        """Serves one stream of a passive party, whose messages are ``requests``."""
        stream: Stream | None = None
        try:
            party = get_caller_name(context, self._keyring)
            self._take_place(party)
            try:
                stream = self._open_stream(party, requests)
                # If this returns False, the stream has ended already.
                if context.add_callback(lambda: stream.outbox.put(None)):
                    certificate = context.auth_context()["x509_pem_cert"][0]
                    yield from self._send_questions(stream, requests, certificate)
            finally:
                with self._changed:
                    self._num_streams[party] -= 1
        except Exception as error:
            if isinstance(error, PeerError):
                self._log_once.warning(f"refused {error.party}", str(error), event="refused")
            elif not isinstance(error, VflError | grpc.RpcError):
                log.exception("internal error", extra={"event": "failed"})
            yield serving_pb2.FromActive(failure=to_failure(error)).SerializeToString()

    def _take_place(self, party: str) -> None:
        if party not in self._widths:
            raise PeerError(
                Code.ROLE_MISMATCH, f"{party} is not a passive party of this model", party=party
            )
        with self._changed:
            if self._num_streams[party] >= MAX_STREAMS:
                raise PeerError(
                    Code.NAME_TAKEN, f"{party} already has {MAX_STREAMS} open streams", party=party
                )
            self._num_streams[party] += 1

    def _open_stream(self, party: str, requests: Iterator[bytes]) -> Stream:
        """Reads the first message of a stream and creates the stream. Raises PeerError if the party
        does not serve this model.
        """
        message = self._parse_message(party, next(requests, b""))
        if not message.HasField("present"):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} opened a stream without naming the model that it serves",
                party=party,
            )
        present = message.present
        if not OLDEST <= present.protocol <= PROTOCOL:
            raise PeerError(
                Code.PROTOCOL_DIFFERS,
                f"{party} speaks protocol {present.protocol}, and this party {OLDEST} and "
                f"{PROTOCOL}. Install the same version at both.",
                party=party,
            )
        if (present.run_id, present.recipe_digest) != (self._run_id, self._digest):
            raise PeerError(
                Code.RECIPE_DIFFERS,
                f"{party} serves another model than {self._run_id}. Give both parties the same run "
                "with --run.",
                party=party,
            )
        return Stream(party, read_cache_policy(present), clean(present.program, _MAX_PROGRAM_CHARS))

    def _send_questions(
        self, stream: Stream, requests: Iterator[bytes], certificate: bytes
    ) -> Iterator[bytes]:
        """Sends questions until the stream ends, while another thread reads the answers."""
        errors: list[Exception] = []

        def listen() -> None:
            try:
                for data in requests:
                    self._handle_answer(stream, data)
            except Exception as error:  # noqa: BLE001 - raised below, in the stream's own thread
                errors.append(error)
            finally:
                stream.outbox.put(None)

        welcome = serving_pb2.FromActive(welcome=serving_pb2.Welcome()).SerializeToString()
        self._register(stream)
        try:
            self._ledger.add(stream.party, CONTROL, CONTROL, "sent", 0, len(welcome))
            yield welcome
            reader = threading.Thread(target=listen, name=f"answers-{stream.party}", daemon=True)
            reader.start()
            for data in self._yield_questions(stream, certificate):
                self._ledger.add(stream.party, PHASE, QUESTION, "sent", 0, len(data))
                yield data
        finally:
            self._unregister(stream)
        for error in errors:
            if not isinstance(error, grpc.RpcError):
                raise error

    def _yield_questions(self, stream: Stream, certificate: bytes) -> Iterator[bytes]:
        """Yields the questions in a stream's outbox until the stream ends. The stream also ends if
        its certificate is revoked or has expired, because a connection may last for months. The
        party then connects again with its current files, and is told why they are refused.
        """
        check_s = time.monotonic() + CHECK_S
        while True:
            try:
                data = stream.outbox.get(timeout=max(0.0, check_s - time.monotonic()))
            except queue.Empty:
                data = b""
            if time.monotonic() >= check_s:
                check_s = time.monotonic() + CHECK_S
                try:
                    self._keyring.require_valid(certificate)
                except PeerError as error:
                    log.warning("%s Its stream ends.", error, extra={"event": "refused"})
                    return
            if data is None:
                return
            if data:
                yield data

    def _register(self, stream: Stream) -> None:
        """Replaces the party's previous stream, which may be dead, with this stream. Raises
        PeerError (NAME_TAKEN) if the previous stream belongs to another program that still answers,
        because otherwise both programs would replace each other for ever.
        """
        party = stream.party
        with self._changed:
            previous = self._streams.get(party)
            # Older releases do not send the name of their program. Their new stream always replaces
            # the previous one.
            programs = {previous.program, stream.program} if previous is not None else set[str]()
            if previous is not None and len(programs - {""}) == 2 and previous.patience.waits:
                raise PeerError(
                    Code.NAME_TAKEN,
                    f"another program of {party} already serves {self._run_id}. Stop one of them.",
                    party=party,
                )
            self._streams[party] = stream
            if self._closed:
                stream.outbox.put(None)
        if previous is not None:
            previous.outbox.put(None)
            self._mark_away(previous)
        else:
            self._log_once.over(f"refused {party}")
            self._attends(party, True)

    def _unregister(self, stream: Stream) -> None:
        with self._changed:
            is_last = self._streams.get(stream.party) is stream
            if is_last:
                del self._streams[stream.party]
        self._mark_away(stream)
        if is_last:
            self._attends(stream.party, False)

    def _mark_away(self, stream: Stream) -> None:
        """Marks the party of a stream as away in all open questions."""
        with self._changed:
            for question in stream.open.values():
                if stream.party in question.waiting:
                    question.waiting.discard(stream.party)
                    question.results[stream.party] = "away"
            stream.open.clear()
            self._changed.notify_all()

    def _handle_answer(self, stream: Stream, data: bytes) -> None:
        """Handles an answer. A late answer is only counted in the ledger."""
        party, message = stream.party, self._parse_message(stream.party, data)
        if message.HasField("present"):
            # The party sends this message again when its features have changed.
            self._ledger.add(party, CONTROL, CONTROL, "received", 0, len(data))
            stream.keeping = read_cache_policy(message.present)
            return
        answer = message.answer
        payload = len(answer.embeddings) + len(answer.answered)
        self._ledger.add(party, PHASE, ANSWER, "received", payload, len(data))
        with self._changed:
            question = stream.open.pop(answer.number, None)
            waited_for = question is not None
            if stream.patience.note_answer(answer.number, time.monotonic(), waited_for=waited_for):
                log.warning("%s answers in time again", party, extra={"event": "attending"})
            if not answer.number or answer.number > self._number:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{party} answered a question that was not asked",
                    party=party,
                )
        if question is None:
            return
        result: ServingAnswer | Absent = "failed"
        try:
            if answer.HasField("failure"):
                error = from_failure(answer.failure, sender=party, me=self._keyring.name)
                self._log_once.warning(party, str(error), event="unanswered", peer=party)
            else:
                step = question.steps[party] if question.steps is not None else None
                result = read_answer(answer, question.ids[party], self._widths[party], party, step)
                self._log_once.over(party)
        finally:
            with self._changed:
                if party in question.waiting:
                    question.waiting.discard(party)
                    question.results[party] = result
                    if not question.waiting:
                        self._changed.notify_all()

    def _parse_message(self, party: str, data: bytes) -> serving_pb2.FromParty:
        try:
            return serving_pb2.FromParty.FromString(data)
        except DecodeError:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} sent bytes that are not a message of serving",
                party=party,
            ) from None


class Pending:
    """A question that was sent and may not be answered yet. ``number``: the number of the
    question.
    """

    def __init__(
        self, service: ServingService, number: int, question: Question, until_s: float
    ) -> None:
        self._service, self.number = service, number
        self._question, self._until_s = question, until_s

    def wait(self) -> dict[str, ServingAnswer | Absent]:
        """Waits until all parties have answered or the time is over. Returns {party: its answer, or
        the reason why there is none}.
        """
        return self._service.wait(self.number, self._question, self._until_s)


class SeveralRuns:
    """Serves the streams of several runs. Runs may be added and removed while it serves.

    Args:
        keyring: The credentials, with the members of all runs.
        parties: The passive parties of all runs.
        max_runs: The maximum number of runs at the same time.
    """

    def __init__(self, keyring: Keyring, parties: Collection[str], max_runs: int) -> None:
        self._keyring, self._parties = keyring, frozenset(parties)
        self._services: dict[str, ServingService] = {}
        # The parties whose refusal was logged.
        self._refused = set[str]()
        self._places = CallLimit(MAX_STREAMS * max_runs, "streams")

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        return stream_handler(SERVICE, Attend=self._attend)

    def add(self, run_id: str, service: ServingService) -> None:
        """Passes the streams of a run to ``service`` from now on."""
        self._services = {**self._services, run_id: service}
        self._refused.clear()

    def remove(self, run_id: str) -> None:
        """Refuses the streams of a run from now on."""
        self._services = {run: s for run, s in self._services.items() if run != run_id}

    def close(self) -> None:
        """Ends all streams."""
        for service in self._services.values():
            service.close()

    def _attend(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        try:
            party = get_caller_name(context, self._keyring)
            service = next(iter(self._services.values()))
            if party not in self._parties:
                # Any service refuses a stranger and sends the reason.
                yield from service.attend(requests, context)
                return
            with self._places.hold(party):
                first = next(requests, b"")
                run_id = _read_run_id(first)
                # Any service refuses a stream that names no run and sends the reason.
                named_service = self._services.get(run_id) if run_id else service
                if named_service is None:
                    raise self._refuse(party)
                yield from named_service.attend(itertools.chain((first,), requests), context)
        except grpc.RpcError:
            # The stream has ended before its first message.
            return
        except PeerError as error:
            yield serving_pb2.FromActive(failure=to_failure(error)).SerializeToString()

    def _refuse(self, party: str) -> PeerError:
        """Returns the refusal of a run that is not served here. It is logged only once for each
        party, because the party repeats its attempt.
        """
        error = PeerError(
            Code.RECIPE_DIFFERS,
            f"{party} serves another run than {list_names([*self._services])}. Give both parties "
            "the same runs with --run.",
            party=party,
        )
        if party not in self._refused:
            self._refused.add(party)
            log.warning("%s", error, extra={"event": "refused"})
        return error


def _read_run_id(data: bytes) -> str:
    try:
        return serving_pb2.FromParty.FromString(data).present.run_id
    except DecodeError:
        return ""
