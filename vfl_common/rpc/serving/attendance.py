"""A passive party's side: keeps a stream to the active party, and answers its questions."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.link import PROTOCOL
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.process.logs import LogOnce
from vfl_common.rpc.channel import connect
from vfl_common.rpc.failures import from_failure, to_failure
from vfl_common.rpc.serving.answered import (
    FLOAT_BYTES,
    CachePolicy,
    OutgoingMessage,
    RecordMessage,
    ServingAnswer,
    Step,
    WithheldError,
    withholding,
)
from vfl_common.rpc.serving.service import SERVICE
from vfl_common.rpc.serving.stream import ANSWER, PHASE, QUESTION

_CONNECT_S = 2.0
# The shortest and the longest pause between two tries to connect.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# Refusals after which another try may succeed: an older stream of this party may be about to end.
_PASSES = (Code.NAME_TAKEN, Code.INTERNAL)
# If the place is taken for longer than this, another program of the party serves: a dead stream of
# this party ends sooner (see ``vfl_common.rpc.channel``).
_TAKEN_S = 60.0
# The most questions that wait for an answer.
_MAX_WAITING = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Asked:
    question: serving_pb2.Question
    until_s: float


@dataclass(frozen=True)
class AttendedRun:
    """The run whose model is served: its id, the digest of its recipe, the most ids of a question,
    and how many questions are answered at the same time.
    """

    run_id: str
    digest: str
    max_ids: int
    at_once: int = 1


@dataclass(frozen=True)
class AttendanceHooks:
    """What a ``ServingClient`` calls.

    Args:
        attends: called when the stream is open (True), and when it is lost (False).
        refused: called with the active party's message if it does not serve this run now; this
            party then tries again, because either may load a run first. None: such a refusal ends
            ``run``.
        writes: records an answer before it leaves.
        keeping: returns how the active party may keep the embeddings now.
    """

    attends: Callable[[bool], None]
    refused: Callable[[str], None] | None = None
    writes: RecordMessage | None = None
    keeping: Callable[[], CachePolicy] = CachePolicy


class ServingClient:
    """Answers the active party's questions, as long as ``run`` runs.

    Args:
        address, peer: the active party's address and name.
        run: the run whose model is served.
        answer: embeds ids, or answers a step about them, until a time (monotonic). Raises
            TimeoutError if it cannot, UntoldError if its answer about the ids may not leave; it
            may raise VflError. An empty text is not an id.
    """

    def __init__(
        self,
        address: str,
        peer: str,
        keyring: Keyring,
        ledger: Ledger,
        *,
        run: AttendedRun,
        answer: Callable[[Sequence[str], float, Step | None], ServingAnswer],
        hooks: AttendanceHooks,
    ) -> None:
        self._address, self._peer, self._keyring, self._ledger = address, peer, keyring, ledger
        self._run, self._answer, self._hooks = run, answer, hooks
        self._once = LogOnce(log)
        self._program = secrets.token_hex(8)
        # When the active party first said that another program has this one's place.
        self._taken_s: float | None = None
        # The outbox of the open stream.
        self._outbox: queue.SimpleQueue[bytes | None] | None = None
        self._ended = threading.Event()
        self._call: grpc.Call | None = None

    def close(self) -> None:
        """Ends ``run`` soon."""
        self._ended.set()
        if (call := self._call) is not None:
            call.cancel()

    def run(self) -> None:
        """Keeps the stream open until ``close``, or until a signal stops the caller. Raises
        VflError if the active party refuses this one.
        """
        pause_s = _PAUSE_S
        has_warned = False
        while not self._ended.is_set():
            channel = connect(self._address, self._keyring.current(), self._peer, _CONNECT_S)
            if isinstance(channel, VflError):
                if channel.code is not Code.UNREACHABLE:
                    raise channel
                if not has_warned:
                    has_warned = True
                    log.warning("%s", channel, extra={"event": "away"})
            else:
                with channel:
                    if self._attend(channel):
                        pause_s, has_warned = _PAUSE_S, False
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def renew(self) -> None:
        """Tells the active party how it may keep the embeddings now; any thread may call it."""
        outbox = self._outbox
        if outbox is not None:
            self._present(outbox)

    def _present(self, outbox: queue.SimpleQueue[bytes | None]) -> None:
        allowed = self._hooks.keeping()
        present = serving_pb2.Present(
            run_id=self._run.run_id,
            recipe_digest=self._run.digest,
            protocol=PROTOCOL,
            program=self._program,
        )
        if allowed.seconds:
            present.keeping.seconds, present.keeping.features = allowed.seconds, allowed.features
        data = serving_pb2.FromParty(present=present).SerializeToString()
        self._ledger.add(self._peer, CONTROL, CONTROL, "sent", 0, len(data))
        outbox.put(data)

    def _attend(self, channel: grpc.Channel) -> bool:
        """Answers until the stream breaks; returns whether the peer accepted this party. Raises the
        peer's refusal.
        """
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        asked: queue.Queue[_Asked | None] = queue.Queue(_MAX_WAITING)
        self._present(outbox)
        call = channel.stream_stream(f"/{SERVICE}/Attend")(_messages(outbox))
        self._call = call
        if self._ended.is_set():
            call.cancel()
        workers = [
            threading.Thread(
                target=self._answering, args=(asked, outbox), name=f"answers-{number}", daemon=True
            )
            for number in range(self._run.at_once)
        ]
        for worker in workers:
            worker.start()
        welcome = False
        try:
            for data in call:
                word = self._read(data)
                if word.HasField("failure"):
                    error = from_failure(word.failure, sender=self._peer, me=self._keyring.name)
                    if error.code in _PASSES and not self._is_taken(error):
                        self._once.warning("away", str(error), event="away")
                        break
                    if error.code is Code.RECIPE_DIFFERS and self._hooks.refused is not None:
                        self._hooks.refused(str(error))
                        break
                    raise error
                if word.HasField("question"):
                    self._ledger.add(self._peer, PHASE, QUESTION, "received", 0, len(data))
                    self._take(word.question, asked)
                elif not welcome:
                    self._ledger.add(self._peer, CONTROL, CONTROL, "received", 0, len(data))
                    welcome, self._taken_s = True, None
                    self._once.over("away")
                    self._outbox = outbox
                    # The features may have changed since the first message.
                    if self._hooks.keeping().seconds:
                        self.renew()
                    self._hooks.attends(True)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise PeerError(
                    Code.ROLE_MISMATCH,
                    f"{self._peer} at {self._address} does not serve a model. Start it first.",
                    party=self._peer,
                ) from None
        finally:
            self._outbox = None
            call.cancel()
            outbox.put(None)
            for _ in workers:
                asked.put(None)
            for worker in workers:
                worker.join()
            if welcome:
                self._hooks.attends(False)
        return welcome

    def _is_taken(self, error: VflError) -> bool:
        """Returns whether another program has had this one's place for too long."""
        if error.code is not Code.NAME_TAKEN:
            return False
        now_s = time.monotonic()
        if self._taken_s is None:
            self._taken_s = now_s
        return now_s - self._taken_s >= _TAKEN_S

    def _take(self, question: serving_pb2.Question, asked: queue.Queue[_Asked | None]) -> None:
        """Queues a question. Raises PeerError if it is invalid."""
        # Further questions of a scoring have no ids: they are about those of the first one.
        min_ids = 0 if question.step.first else 1
        if not question.number or not min_ids <= len(question.ids) <= self._run.max_ids:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._peer} must ask for 1 to {self._run.max_ids:,} ids (got "
                f"{len(question.ids):,})",
                party=self._peer,
            )
        asked.put(_Asked(question, time.monotonic() + question.left_ms / 1000))

    def _answering(
        self, asked: queue.Queue[_Asked | None], outbox: queue.SimpleQueue[bytes | None]
    ) -> None:
        """Answers questions in their order, except those whose time is over, because the active
        party no longer waits for them.
        """
        while (asked_now := asked.get()) is not None:
            if time.monotonic() >= asked_now.until_s:
                continue
            try:
                data, sent = self._answer_question(asked_now)
                self._once.over("answer")
            except TimeoutError:
                continue
            except Exception as failed:  # noqa: BLE001 - it is logged, and the peer reads of it
                cause = failed.__cause__ if isinstance(failed, WithheldError) else None
                error = cause if isinstance(cause, Exception) else failed
                is_defect = not isinstance(error, VflError)
                self._once.warning(
                    "answer", f"no answer: {error}", exc_info=is_defect, event="unanswered"
                )
                answer = serving_pb2.Answer(number=asked_now.question.number)
                answer.failure.CopyFrom(to_failure(error))
                data, sent = serving_pb2.FromParty(answer=answer).SerializeToString(), 0
            self._ledger.add(self._peer, PHASE, ANSWER, "sent", sent, len(data))
            outbox.put(data)

    def _answer_question(self, asked: _Asked) -> tuple[bytes, int]:
        """Returns an answer as it is sent, after recording it, and how many of its bytes are
        numbers. Raises VflError and TimeoutError as ``answer`` does.
        """
        question, step = asked.question, _step_of(asked.question)
        ids = list(question.ids)
        count = len(ids) - ids.count("")
        try:
            result = self._record(question, step, count, self._answer(ids, asked.until_s, step))
        except WithheldError as error:
            if not ids:
                # The first answer of this scoring has been sent, so this one must fail.
                raise
            self._once.warning("untold", f"answers for none of the ids: {error}", event="untold")
        else:
            self._once.over("untold")
            return result
        no_ids = [""] * len(ids)
        return self._record(question, step, count, self._answer(no_ids, asked.until_s, step))

    def _record(
        self, question: serving_pb2.Question, step: Step | None, asked: int, content: ServingAnswer
    ) -> tuple[bytes, int]:
        """Records an answer; returns it as it is sent, and how many of its bytes are numbers.
        Raises UntoldError if it may not leave. ``asked``: the number of ids in the question.
        """
        answer = serving_pb2.Answer(
            number=question.number,
            state=content.state,
            embeddings=content.embeddings,
            features=content.features,
            answered=content.answered,
        )
        data = serving_pb2.FromParty(answer=answer).SerializeToString()
        numbers = content.embeddings or content.answered
        if self._hooks.writes is not None:
            first = step.first if step is not None else question.number
            outgoing = OutgoingMessage(
                to=self._peer,
                phase=PHASE,
                kind=ANSWER,
                scoring=first,
                place=question.number - first,
                ids=content.ids,
                times=content.times,
                numbers=len(content.embeddings) // FLOAT_BYTES + len(content.answered),
                content=numbers,
                payload_bytes=len(numbers),
                message_bytes=len(data),
                asked=asked,
            )
            with withholding:
                self._hooks.writes(outgoing)
        return data, len(numbers)

    def _read(self, data: bytes) -> serving_pb2.FromActive:
        try:
            return serving_pb2.FromActive.FromString(data)
        except DecodeError:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._peer} sent bytes that are not a message of serving",
                party=self._peer,
            ) from None


def _step_of(question: serving_pb2.Question) -> Step | None:
    if not question.HasField("step"):
        return None
    first = question.step.first
    return Step(question.step.asked, first or question.number, begins=not first)


def _messages(outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (data := outbox.get()) is not None:
        yield data
