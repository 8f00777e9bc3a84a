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
    Answered,
    Keeping,
    Outgoing,
    Step,
    UntoldError,
    Writes,
    untold,
)
from vfl_common.rpc.serving.service import SERVICE
from vfl_common.rpc.serving.stream import ANSWER, PHASE, QUESTION

_CONNECT_S = 2.0
# Between two tries: the shortest, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# Refusals that another try may not meet: an older stream of this party may be about to end.
_PASSES = (Code.NAME_TAKEN, Code.INTERNAL)
# A dead stream of this party ends sooner (see ``vfl_common.rpc.channel``), so after that another
# program of the party serves.
_TAKEN_S = 60.0
# The peer asks many at once, and waits for none of them long.
_MOST_WAITING = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Asked:
    question: serving_pb2.Question
    until_s: float


class Attendance:
    """Answers the active party's questions, as long as ``run`` runs.

    Args:
        address, peer: of the active party.
        run_id, digest: of the model and of its recipe.
        most_ids: of a question.
        answer: embeds ids, or answers a step about them, until a time (monotonic). Raises
            TimeoutError if it cannot, UntoldError if what it has about the ids may not leave; it
            may raise VflError. An empty text is nobody's id.
        keeping: what the active party may do with the embeddings now.
        at_once: how many questions are answered at the same time.
        attends: called when the stream is up (True), and when it is lost.
        refused: called with the active party's words if it does not serve this run now; then this
            party tries again, since either may load a run before the other does. None: such a
            refusal ends it.
        writes: writes down what an answer tells, before it leaves.
    """

    def __init__(
        self,
        address: str,
        peer: str,
        keyring: Keyring,
        ledger: Ledger,
        *,
        run_id: str,
        digest: str,
        most_ids: int,
        answer: Callable[[Sequence[str], float, Step | None], Answered],
        attends: Callable[[bool], None],
        refused: Callable[[str], None] | None = None,
        writes: Writes | None = None,
        keeping: Callable[[], Keeping] = Keeping,
        at_once: int = 1,
    ) -> None:
        self._address, self._peer, self._keyring, self._ledger = address, peer, keyring, ledger
        self._run_id, self._digest, self._most_ids = run_id, digest, most_ids
        self._answer, self._attends, self._refused = answer, attends, refused
        self._keeping, self._at_once, self._writes = keeping, at_once, writes
        self._once = LogOnce(log)
        self._program = secrets.token_hex(8)
        # Since when the active party says that another program has this one's place.
        self._taken_s: float | None = None
        # Of the stream that is up.
        self._outbox: queue.SimpleQueue[bytes | None] | None = None
        self._ended = threading.Event()
        self._call: grpc.Call | None = None

    def close(self) -> None:
        """Has ``run`` end soon."""
        self._ended.set()
        if (call := self._call) is not None:
            call.cancel()

    def run(self) -> None:
        """Keeps the stream up until ``close``, or until the caller is stopped by a signal. Raises
        VflError if the active party refuses this one.
        """
        pause_s = _PAUSE_S
        told: str | None = None
        while not self._ended.is_set():
            channel = connect(self._address, self._keyring.current(), self._peer, _CONNECT_S)
            if isinstance(channel, VflError):
                if channel.code is not Code.UNREACHABLE:
                    raise channel
                if told is None:
                    told = str(channel)
                    log.warning("%s", told, extra={"event": "away"})
            else:
                with channel:
                    if self._attend(channel):
                        pause_s, told = _PAUSE_S, None
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def renew(self) -> None:
        """Tells the active party what it may do with the embeddings now; any thread may call it."""
        outbox = self._outbox
        if outbox is not None:
            self._present(outbox)

    def _present(self, outbox: queue.SimpleQueue[bytes | None]) -> None:
        allowed = self._keeping()
        present = serving_pb2.Present(
            run_id=self._run_id,
            recipe_digest=self._digest,
            protocol=PROTOCOL,
            program=self._program,
        )
        if allowed.seconds:
            present.keeping.seconds, present.keeping.features = allowed.seconds, allowed.features
        data = serving_pb2.FromParty(present=present).SerializeToString()
        self._ledger.add(self._peer, CONTROL, CONTROL, "sent", 0, len(data))
        outbox.put(data)

    def _attend(self, channel: grpc.Channel) -> bool:
        """Answers until the stream breaks; returns whether the party was welcome. Raises its
        peer's refusal.
        """
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        asked: queue.Queue[_Asked | None] = queue.Queue(_MOST_WAITING)
        self._present(outbox)
        call = channel.stream_stream(f"/{SERVICE}/Attend")(_sent(outbox))
        self._call = call
        if self._ended.is_set():
            call.cancel()
        workers = [
            threading.Thread(
                target=self._answering, args=(asked, outbox), name=f"answers-{number}", daemon=True
            )
            for number in range(self._at_once)
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
                    if error.code is Code.RECIPE_DIFFERS and self._refused is not None:
                        self._refused(str(error))
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
                    if self._keeping().seconds:
                        self.renew()
                    self._attends(True)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                text = f"{self._peer} at {self._address} does not serve a model; start it first"
                raise PeerError(Code.ROLE_MISMATCH, text, party=self._peer) from None
        finally:
            self._outbox = None
            call.cancel()
            outbox.put(None)
            for _ in workers:
                asked.put(None)
            for worker in workers:
                worker.join()
            if welcome:
                self._attends(False)
        return welcome

    def _is_taken(self, error: VflError) -> bool:
        """Whether another program has had this one's place for too long."""
        if error.code is not Code.NAME_TAKEN:
            return False
        now_s = time.monotonic()
        if self._taken_s is None:
            self._taken_s = now_s
        return now_s - self._taken_s >= _TAKEN_S

    def _take(self, question: serving_pb2.Question, asked: queue.Queue[_Asked | None]) -> None:
        """Queues a question. Raises PeerError if it is none."""
        # Further questions of a scoring are about the ids of its first one.
        fewest = 0 if question.step.first else 1
        if not question.number or not fewest <= len(question.ids) <= self._most_ids:
            text = f"{self._peer} asks for {len(question.ids):,} ids, and 1 to {self._most_ids:,}"
            raise PeerError(Code.MALFORMED_MESSAGE, f"{text} may be asked", party=self._peer)
        asked.put(_Asked(question, time.monotonic() + question.left_ms / 1000))

    def _answering(
        self, asked: queue.Queue[_Asked | None], outbox: queue.SimpleQueue[bytes | None]
    ) -> None:
        """Answers in the order of the questions; nobody waits any more for one whose time is over,
        and the active party knows by itself that this one is late.
        """
        while (each := asked.get()) is not None:
            if time.monotonic() >= each.until_s:
                continue
            try:
                data, sent = self._answered(each)
                self._once.over("answer")
            except TimeoutError:
                continue
            except Exception as failed:  # noqa: BLE001 - it is logged, and the peer reads of it
                cause = failed.__cause__ if isinstance(failed, UntoldError) else None
                error = cause if isinstance(cause, Exception) else failed
                defect = not isinstance(error, VflError)
                text = f"no answer: {error}"
                self._once.warning("answer", text, exc_info=defect, event="unanswered")
                answer = serving_pb2.Answer(number=each.question.number)
                answer.failure.CopyFrom(to_failure(error))
                data, sent = serving_pb2.FromParty(answer=answer).SerializeToString(), 0
            self._ledger.add(self._peer, PHASE, ANSWER, "sent", sent, len(data))
            outbox.put(data)

    def _answered(self, asked: _Asked) -> tuple[bytes, int]:
        """Returns an answer as it leaves, which is written down by then, and how many of its bytes
        are numbers. Raises VflError and TimeoutError as ``answer``.
        """
        question, step = asked.question, _step_of(asked.question)
        ids = list(question.ids)
        count = len(ids) - ids.count("")
        try:
            found = self._written(question, step, count, self._answer(ids, asked.until_s, step))
        except UntoldError as error:
            if not ids:
                # A later step of a scoring, whose first answer has left.
                raise
            text = f"answers for none of the ids: {error}"
            self._once.warning("untold", text, event="untold")
        else:
            self._once.over("untold")
            return found
        nobody = [""] * len(ids)
        return self._written(question, step, count, self._answer(nobody, asked.until_s, step))

    def _written(
        self, question: serving_pb2.Question, step: Step | None, asked: int, found: Answered
    ) -> tuple[bytes, int]:
        """Writes an answer down; returns it as it leaves, and how many of its bytes are numbers.
        Raises UntoldError if it may not leave. ``asked``: the number of ids in the question.
        """
        answer = serving_pb2.Answer(
            number=question.number,
            state=found.state,
            embeddings=found.embeddings,
            features=found.features,
            answered=found.answered,
        )
        data = serving_pb2.FromParty(answer=answer).SerializeToString()
        content = found.embeddings or found.answered
        if self._writes is not None:
            first = step.first if step is not None else question.number
            told = Outgoing(
                to=self._peer,
                phase=PHASE,
                kind=ANSWER,
                scoring=first,
                place=question.number - first,
                ids=found.ids,
                times=found.times,
                numbers=len(found.embeddings) // FLOAT_BYTES + len(found.answered),
                content=content,
                payload_bytes=len(content),
                message_bytes=len(data),
                asked=asked,
            )
            with untold:
                self._writes(told)
        return data, len(content)

    def _read(self, data: bytes) -> serving_pb2.FromActive:
        try:
            return serving_pb2.FromActive.FromString(data)
        except DecodeError:
            text = f"{self._peer} sent bytes that are no message of serving"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self._peer) from None


def _step_of(question: serving_pb2.Question) -> Step | None:
    if not question.HasField("step"):
        return None
    first = question.step.first
    return Step(question.step.asked, first or question.number, begins=not first)


def _sent(outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (data := outbox.get()) is not None:
        yield data
