"""A passive party's side of serving: keeps a stream to the active party open and answers the
questions on it.
"""

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

from vfl_common.bundle import CONTROL, PROTOCOL, Ledger
from vfl_common.errors import Code, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.process.logs import LogOnce
from vfl_common.rpc.channel import connect
from vfl_common.rpc.messages import from_failure, to_failure
from vfl_common.rpc.serving.service import SERVICE
from vfl_common.rpc.serving.stream import (
    ANSWER,
    FLOAT_BYTES,
    PHASE,
    QUESTION,
    CachePolicy,
    OutgoingMessage,
    RecordMessage,
    ServingAnswer,
    Step,
    WithheldError,
    withhold_on_error,
)

_CONNECT_S = 2.0
# The shortest and the longest pause between two attempts to connect.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# The refusals after which another attempt may succeed, because an older stream of this party may be
# about to end.
_RETRYABLE = (Code.NAME_TAKEN, Code.INTERNAL)
# The time after which a taken place means that another program of this party serves. A dead stream
# of this party ends sooner (see ``vfl_common.rpc.channel``).
_TAKEN_S = 60.0
# The maximum number of questions that wait for an answer.
_MAX_WAITING = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _TimedQuestion:
    question: serving_pb2.Question
    until_s: float


@dataclass(frozen=True)
class AttendedRun:
    """The run whose model is served. ``digest``: the digest of its recipe. ``max_ids``: the maximum
    number of ids in a question. ``at_once``: the number of questions that are answered at the same
    time.
    """

    run_id: str
    digest: str
    max_ids: int
    at_once: int = 1


@dataclass(frozen=True)
class AttendanceHooks:
    """The callbacks of a ``ServingClient``.

    Args:
        attends: Called with True when the stream is open, and with False when it is lost.
        refused: Called with the active party's message if it does not serve this run now. This
            party then tries again, because either party may load a run first. If it is None, such a
            refusal ends ``run``.
        writes: Records an answer before it is sent.
        keeping: Returns the current permission to cache embeddings.
    """

    attends: Callable[[bool], None]
    refused: Callable[[str], None] | None = None
    writes: RecordMessage | None = None
    keeping: Callable[[], CachePolicy] = CachePolicy


class ServingClient:
    """Answers the active party's questions while ``run`` runs.

    Args:
        address, peer: The active party's address and name.
        run: The run whose model is served.
        answer: Embeds ids, or answers a step about them, until a given time (monotonic). An empty
            text is not an id. It raises TimeoutError if the time is over, WithheldError if the
            answer may not be sent, and may raise VflError.
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
        self._log_once = LogOnce(log)
        self._program = secrets.token_hex(8)
        # The time at which the active party first reported that another program serves for this
        # party.
        self._taken_s: float | None = None
        # The outbox of the open stream.
        self._outbox: queue.SimpleQueue[bytes | None] | None = None
        self._ended = threading.Event()
        self._call: grpc.Call | None = None

    def close(self) -> None:
        """Makes ``run`` return soon."""
        self._ended.set()
        if (call := self._call) is not None:
            call.cancel()

    def run(self) -> None:
        """Keeps the stream open until ``close`` is called or a signal stops the caller. Raises
        VflError if the active party refuses this party.
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
                    if self._answer_stream(channel):
                        pause_s, has_warned = _PAUSE_S, False
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def renew(self) -> None:
        """Sends the active party the current permission to cache embeddings. Any thread may call
        it.
        """
        outbox = self._outbox
        if outbox is not None:
            self._send_presence(outbox)

    def _send_presence(self, outbox: queue.SimpleQueue[bytes | None]) -> None:
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

    def _answer_stream(self, channel: grpc.Channel) -> bool:
        """Answers questions until the stream breaks. Returns whether the peer accepted this party.
        Raises the peer's refusal.
        """
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        questions: queue.Queue[_TimedQuestion | None] = queue.Queue(_MAX_WAITING)
        self._send_presence(outbox)
        call = channel.stream_stream(f"/{SERVICE}/Attend")(_yield_messages(outbox))
        self._call = call
        if self._ended.is_set():
            call.cancel()
        workers = [
            threading.Thread(
                target=self._answer_questions,
                args=(questions, outbox),
                name=f"answers-{number}",
                daemon=True,
            )
            for number in range(self._run.at_once)
        ]
        for worker in workers:
            worker.start()
        is_welcome = False
        try:
            for data in call:
                message = self._parse_message(data)
                if message.HasField("failure"):
                    error = from_failure(message.failure, sender=self._peer, me=self._keyring.name)
                    if error.code in _RETRYABLE and not self._is_taken(error):
                        self._log_once.warning("away", str(error), event="away")
                        break
                    if error.code is Code.RECIPE_DIFFERS and self._hooks.refused is not None:
                        self._hooks.refused(str(error))
                        break
                    raise error
                if message.HasField("question"):
                    self._ledger.add(self._peer, PHASE, QUESTION, "received", 0, len(data))
                    self._queue_question(message.question, questions)
                elif not is_welcome:
                    self._ledger.add(self._peer, CONTROL, CONTROL, "received", 0, len(data))
                    is_welcome, self._taken_s = True, None
                    self._log_once.over("away")
                    self._outbox = outbox
                    # The features may have changed since the first message was sent.
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
                questions.put(None)
            for worker in workers:
                worker.join()
            if is_welcome:
                self._hooks.attends(False)
        return is_welcome

    def _is_taken(self, error: VflError) -> bool:
        """Returns whether another program has served for this party for too long."""
        if error.code is not Code.NAME_TAKEN:
            return False
        now_s = time.monotonic()
        if self._taken_s is None:
            self._taken_s = now_s
        return now_s - self._taken_s >= _TAKEN_S

    def _queue_question(
        self, question: serving_pb2.Question, questions: queue.Queue[_TimedQuestion | None]
    ) -> None:
        """Queues a question. Raises PeerError if it is invalid."""
        # Further questions of a scoring have no ids, because they are about the ids of the first
        # question.
        min_ids = 0 if question.step.first else 1
        if not question.number or not min_ids <= len(question.ids) <= self._run.max_ids:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._peer} must ask for 1 to {self._run.max_ids:,} ids (got "
                f"{len(question.ids):,})",
                party=self._peer,
            )
        questions.put(_TimedQuestion(question, time.monotonic() + question.left_ms / 1000))

    def _answer_questions(
        self, questions: queue.Queue[_TimedQuestion | None], outbox: queue.SimpleQueue[bytes | None]
    ) -> None:
        """Answers questions in order. Skips a question whose time is over, because the active party
        no longer waits for its answer.
        """
        while (timed_question := questions.get()) is not None:
            if time.monotonic() >= timed_question.until_s:
                continue
            try:
                data, payload_bytes = self._answer_question(timed_question)
                self._log_once.over("answer")
            except TimeoutError:
                continue
            except Exception as raised:  # noqa: BLE001 - it is logged, and the peer gets its public text
                cause = raised.__cause__ if isinstance(raised, WithheldError) else None
                error = cause if isinstance(cause, Exception) else raised
                is_defect = not isinstance(error, VflError)
                self._log_once.warning(
                    "answer", f"no answer: {error}", exc_info=is_defect, event="unanswered"
                )
                answer = serving_pb2.Answer(number=timed_question.question.number)
                answer.failure.CopyFrom(to_failure(error))
                data, payload_bytes = serving_pb2.FromParty(answer=answer).SerializeToString(), 0
            self._ledger.add(self._peer, PHASE, ANSWER, "sent", payload_bytes, len(data))
            outbox.put(data)

    def _answer_question(self, timed_question: _TimedQuestion) -> tuple[bytes, int]:
        """Computes and records the answer to a question. Returns the answer's message and the
        number of payload bytes in it. Raises VflError and TimeoutError as ``answer`` does.
        """
        question, step = timed_question.question, _parse_step(timed_question.question)
        ids = list(question.ids)
        count = len(ids) - ids.count("")
        try:
            result = self._record(
                question, step, count, self._answer(ids, timed_question.until_s, step)
            )
        except WithheldError as error:
            if not ids:
                # The first answer of this scoring has been sent already, so this answer must fail.
                raise
            self._log_once.warning(
                "untold", f"answers for none of the ids: {error}", event="untold"
            )
        else:
            self._log_once.over("untold")
            return result
        no_ids = [""] * len(ids)
        return self._record(
            question, step, count, self._answer(no_ids, timed_question.until_s, step)
        )

    def _record(
        self, question: serving_pb2.Question, step: Step | None, asked: int, content: ServingAnswer
    ) -> tuple[bytes, int]:
        """Records an answer. Returns its message and the number of payload bytes in it. Raises
        WithheldError if the answer may not be sent. ``asked``: the number of ids in the question.
        """
        answer = serving_pb2.Answer(
            number=question.number,
            state=content.state,
            embeddings=content.embeddings,
            features=content.features,
            answered=content.answered,
        )
        data = serving_pb2.FromParty(answer=answer).SerializeToString()
        payload = content.embeddings or content.answered
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
                content=payload,
                payload_bytes=len(payload),
                message_bytes=len(data),
                asked=asked,
            )
            with withhold_on_error:
                self._hooks.writes(outgoing)
        return data, len(payload)

    def _parse_message(self, data: bytes) -> serving_pb2.FromActive:
        try:
            return serving_pb2.FromActive.FromString(data)
        except DecodeError:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._peer} sent bytes that are not a message of serving",
                party=self._peer,
            ) from None


def _parse_step(question: serving_pb2.Question) -> Step | None:
    if not question.HasField("step"):
        return None
    first = question.step.first
    return Step(question.step.asked, first or question.number, begins=not first)


def _yield_messages(outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (data := outbox.get()) is not None:
        yield data
