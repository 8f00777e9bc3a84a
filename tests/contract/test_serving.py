"""Questions to passive parties over gRPC: what is answered, who is away, and lies."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.contract.exchanges import WAIT_S, credentials, keyring
from tests.harness.errors import assert_names, raises
from tests.harness.waiting import wait_until
from vfl_common.bundle import PROTOCOL, Ledger
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.channel import dial, run_server
from vfl_common.rpc.serving import attendance as attending
from vfl_common.rpc.serving import service as answering
from vfl_common.rpc.serving.attendance import AttendanceHooks, AttendedRun, ServingClient
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, ServingService, SeveralRuns
from vfl_common.rpc.serving.stream import (
    EMBEDDED,
    MAX_LATE,
    NOT_ANSWERED,
    CachePolicy,
    OutgoingMessage,
    ServingAnswer,
    Step,
    WithheldError,
    read_cache_policy,
)

ME, RUN, DIGEST = "active", "run", "digest"
WIDTHS = {"north": 2, "south": 1}
VALUES = {"a": 1.0, "b": 2.0}


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def service(ledger: Ledger) -> ServingService:
    return service_of(RUN, WIDTHS, ledger)


@pytest.fixture
def address(service: ServingService) -> Iterator[str]:
    with run_server("127.0.0.1:0", keyring(ME), [service], 12) as (_, found):
        yield found
        service.close()


def embedded(width: int, ids: Sequence[str]) -> ServingAnswer:
    """Answers as a party that knows ``a`` and ``b``."""
    state = bytes(EMBEDDED if i in VALUES else NOT_ANSWERED for i in ids)
    numbers = [VALUES[each] for each in ids if each in VALUES for _ in range(width)]
    return ServingAnswer(state, np.array(numbers, "<f4").tobytes(), "v1")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e9])
def test_a_number_that_is_none_lets_nothing_be_kept(seconds: float) -> None:
    given = serving_pb2.Present(keeping=serving_pb2.Keeping(seconds=seconds, features="v"))
    assert read_cache_policy(given) == CachePolicy(0.0, "v")
    assert read_cache_policy(serving_pb2.Present()) == CachePolicy()


def attend(
    name: str, address: str, *, run_id: str = RUN, digest: str = DIGEST, **more: Any
) -> list[Exception]:
    """Has a party attend in a thread of its own; returns the list of how it ended."""
    return run(attendance_of(name, address, run_id, digest, **more))


def run(attendance: ServingClient) -> list[Exception]:
    ended: list[Exception] = []

    def attends() -> None:
        try:
            attendance.run()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended.append(error)

    threading.Thread(target=attends, daemon=True).start()
    return ended


def attendance_of(
    name: str,
    address: str,
    run_id: str = RUN,
    digest: str = DIGEST,
    *,
    answer: Callable[[Sequence[str], float, Any], Any] | None = None,
    at_once: int = 1,
    **hooks: Any,
) -> ServingClient:
    return ServingClient(
        address,
        ME,
        keyring(name),
        Ledger(),
        run=AttendedRun(run_id, digest, max_ids=10, at_once=at_once),
        answer=answer or (lambda ids, _until_s, _step: embedded(WIDTHS.get(name, 1), ids)),
        hooks=AttendanceHooks(attends=lambda _here: None, **hooks),
    )


def test_each_party_answers_for_the_ids_that_it_knows(
    service: ServingService, address: str, ledger: Ledger
) -> None:
    for name in WIDTHS:
        attend(name, address)
    wait_until(lambda: service.present == [*WIDTHS])
    found = service.ask(["b", "x", "c", "a"], WAIT_S).wait()
    for name, width in WIDTHS.items():
        answer = found[name]
        assert isinstance(answer, ServingAnswer)
        assert answer.state == bytes((EMBEDDED, NOT_ANSWERED, NOT_ANSWERED, EMBEDDED))
        numbers = np.frombuffer(answer.embeddings, "<f4").tolist()
        assert numbers == [2.0] * width + [1.0] * width
    payload = {each.peer: each.payload_bytes for each in ledger.entries() if each.kind == "answer"}
    assert payload == {"north": 16, "south": 8}


def test_a_party_may_be_asked_for_fewer_ids(service: ServingService, address: str) -> None:
    for name in WIDTHS:
        attend(name, address)
    wait_until(lambda: service.present == [*WIDTHS])
    found = service.ask(["b", "x", "a"], WAIT_S, ids_of={"north": ["a"], "south": []}).wait()
    assert found["north"] == embedded(2, ["a"])
    # It is not asked.
    assert found["south"] == ServingAnswer(b"")


def test_a_party_says_anew_what_may_be_kept(service: ServingService, address: str) -> None:
    allowed = [CachePolicy(60.0, "v1")]
    north = attendance_of("north", address, keeping=lambda: allowed[0])
    run(north)
    attend("south", address)
    wait_until(lambda: service.present == [*WIDTHS])
    assert service.keeping() == {"north": CachePolicy(60.0, "v1"), "south": CachePolicy()}
    allowed[0] = CachePolicy(5.0, "v2")

    def told() -> bool:
        # The party itself may not know yet that it is welcome.
        north.renew()
        return service.keeping()["north"] == allowed[0]

    wait_until(told)
    assert isinstance(service.ask(["a"], WAIT_S).wait()["north"], ServingAnswer)


def test_a_party_without_features_in_time_is_late_and_answers_the_next(
    service: ServingService, address: str
) -> None:
    """Questions that are answered at the same time do not wait for each other."""
    over = threading.Event()

    def answer(ids: Sequence[str], until_s: float, _step: Step | None) -> ServingAnswer:
        if ids[0] == "a" and not over.wait(until_s - time.monotonic()):
            raise TimeoutError
        return embedded(2, ids)

    run(attendance_of("north", address, answer=answer, at_once=2))
    wait_until(lambda: service.present == ["north"])
    slow = service.ask(["a"], 0.3)
    assert service.ask(["b"], WAIT_S).wait()["north"] == embedded(2, ["b"])
    assert slow.wait()["north"] == "late"
    over.set()
    assert service.ask(["a"], WAIT_S).wait()["north"] == embedded(2, ["a"])


def test_a_party_that_has_never_come_is_away_at_once(service: ServingService, address: str) -> None:
    attend("south", address)
    wait_until(lambda: service.present == ["south"])
    found = service.ask(["a"], WAIT_S).wait()
    assert found["north"] == "away"
    assert isinstance(found["south"], ServingAnswer)


@pytest.mark.parametrize(
    ("name", "given", "code"),
    [
        ("north", {"run_id": "another"}, Code.RECIPE_DIFFERS),
        ("north", {"digest": "another"}, Code.RECIPE_DIFFERS),
        ("west", {}, Code.ROLE_MISMATCH),
    ],
)
def test_a_party_of_another_model_is_refused(
    address: str, name: str, given: dict[str, str], code: Code
) -> None:
    ended = attend(name, address, **given)
    wait_until(lambda: bool(ended))
    with raises(PeerError, code):
        raise ended[0]


Say = Callable[[serving_pb2.FromParty | bytes], None]


@contextmanager
def liar(address: str) -> Iterator[tuple[Iterator[bytes], Say]]:
    """Opens a stream as north; yields what it hears, and says what it is given."""
    outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def say(word: serving_pb2.FromParty | bytes) -> None:
        outbox.put(word if isinstance(word, bytes) else word.SerializeToString())

    with dial(address, credentials("north"), ME) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Attend")(iter(outbox.get, None))
        yield call, say
        outbox.put(None)


def present(protocol: int = PROTOCOL) -> serving_pb2.FromParty:
    said = serving_pb2.Present(run_id=RUN, recipe_digest=DIGEST, protocol=protocol)
    return serving_pb2.FromParty(present=said)


@pytest.mark.parametrize(
    "first",
    [b"", b"\xff\xff", present(999), serving_pb2.FromParty(answer=serving_pb2.Answer(number=1))],
    ids=["nothing", "bytes", "protocol", "answer"],
)
def test_who_begins_with_something_else_hears_why_not(
    service: ServingService, address: str, first: serving_pb2.FromParty | bytes
) -> None:
    with liar(address) as (heard, say):
        say(first)
        word = serving_pb2.FromActive.FromString(next(heard))
    assert word.failure.code
    assert service.present == []


@pytest.mark.parametrize(
    "lie",
    [
        serving_pb2.Answer(number=1, state=b"\x01", embeddings=b"\x00" * 7),
        serving_pb2.Answer(number=1, state=b"\x01", embeddings=b"\x00" * 4000),
        serving_pb2.Answer(number=1, state=b"\x01\x01", embeddings=b"\x00" * 16),
        serving_pb2.Answer(number=1, state=b"\x07"),
        serving_pb2.Answer(number=1),
        serving_pb2.Answer(number=99, state=b"\x01", embeddings=b"\x00" * 8),
        serving_pb2.Answer(number=0),
    ],
    ids=["short", "long", "more ids", "state", "nothing", "not asked", "number 0"],
)
def test_a_lie_ends_the_stream_and_the_party_is_away(
    service: ServingService, address: str, lie: serving_pb2.Answer
) -> None:
    with liar(address) as (heard, say):
        say(present())
        next(heard)
        wait_until(lambda: service.present == ["north"])
        pending = service.ask(["a"], WAIT_S)
        next(heard)
        say(serving_pb2.FromParty(answer=lie))
        (word,) = [serving_pb2.FromActive.FromString(data) for data in heard]
    assert word.failure.code == int(Code.MALFORMED_MESSAGE)
    assert pending.wait()["north"] in ("away", "failed")
    wait_until(lambda: service.present == [])


def test_a_newer_stream_takes_the_place_of_an_older_one(
    service: ServingService, address: str
) -> None:
    with liar(address) as (heard, say):
        say(present())
        next(heard)
        wait_until(lambda: service.present == ["north"])
        pending = service.ask(["a"], WAIT_S)
        attend("north", address)
        assert pending.wait()["north"] == "away"
        wait_until(
            lambda: service.ask(["a"], WAIT_S).wait()["north"],
            lambda found: isinstance(found, ServingAnswer),
        )


def test_a_second_program_of_a_party_is_refused_by_name(
    service: ServingService, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would take the place from each other for ever, and some rows would miss the party."""
    first = attendance_of("north", address)
    run(first)
    attend("south", address)
    wait_until(lambda: service.present == [*WIDTHS])
    monkeypatch.setattr(attending, "_TAKEN_S", 0.3)
    ended = attend("north", address)
    wait_until(lambda: ended)
    assert isinstance(ended[0], PeerError)
    assert ended[0].code is Code.NAME_TAKEN
    assert_names(str(ended[0]), "north")
    assert isinstance(service.ask(["a"], WAIT_S).wait()["north"], ServingAnswer)
    # Once the first has ended, another takes its place.
    second = attend("north", address)
    first.close()
    wait_until(
        lambda: service.ask(["a"], WAIT_S).wait()["north"],
        lambda found: isinstance(found, ServingAnswer),
    )
    assert not second


def test_a_revoked_party_is_let_go_although_its_connection_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "CHECK_S", 0.1)
    revoked = tmp_path / "revoked.txt"
    revoked.write_text("")
    own = Keyring(keyring(ME)._tls.model_copy(update={"revoked": str(revoked)}), ME)
    service = ServingService(
        WIDTHS, own, Ledger(), run_id=RUN, digest=DIGEST, attends=lambda _name, _here: None
    )
    with run_server("127.0.0.1:0", own, [service], 12) as (_, address):
        north, south = attend("north", address), attend("south", address)
        wait_until(lambda: service.present == [*WIDTHS])
        revoked.write_text(f"{credentials('north').certificate.serial_number:x}\n")
        wait_until(lambda: service.present == ["south"])
        wait_until(lambda: north)
        assert isinstance(north[0], PeerError)
        assert north[0].code is Code.CERTIFICATE_INVALID
        assert isinstance(service.ask(["a"], WAIT_S).wait()["south"], ServingAnswer)
        assert not south
        service.close()


def test_who_does_not_answer_is_late(service: ServingService, address: str) -> None:
    with liar(address) as (heard, say):
        say(present())
        next(heard)
        wait_until(lambda: service.present == ["north"])
        assert service.ask(["a"], 0.05).wait() == {"north": "late", "south": "away"}


def test_who_takes_no_questions_fills_no_memory(service: ServingService, address: str) -> None:
    with liar(address) as (heard, say):
        say(present())
        next(heard)
        wait_until(lambda: service.present == ["north"])
        ids = ["a" * 1_000] * 500

        def refuses() -> bool:
            # Half a megabyte each; gRPC takes a few ahead of the reader. Soon only probes are sent,
            # and these are worth nothing at once.
            for _ in range(100):
                service.ask(ids, 0.0).wait()
            began_s = time.monotonic()
            assert service.ask(ids, 0.5).wait()["north"] in ("late", "away")
            assert time.monotonic() - began_s < 0.25
            return service.ask(ids, 0.5).wait()["north"] == "late"

        wait_until(refuses)


@pytest.fixture
def several(ledger: Ledger) -> SeveralRuns:
    """Serves the runs ``a``, of both parties, and ``b``, of south alone."""
    found = SeveralRuns(keyring(ME), [*WIDTHS], 2)
    for run_id, widths in (("a", WIDTHS), ("b", {"south": 1})):
        found.add(run_id, service_of(run_id, widths, ledger))
    return found


def service_of(run_id: str, widths: dict[str, int], ledger: Ledger) -> ServingService:
    return ServingService(
        widths, keyring(ME), ledger, run_id=run_id, digest=DIGEST, attends=lambda _name, _here: None
    )


@pytest.fixture
def port(several: SeveralRuns) -> Iterator[str]:
    with run_server("127.0.0.1:0", keyring(ME), [several], 20) as (_, found):
        yield found
        several.close()


def there(several: SeveralRuns, run_id: str, *names: str) -> None:
    wait_until(lambda: several._services[run_id].present == [*names])


def test_each_stream_goes_to_the_run_that_it_names(several: SeveralRuns, port: str) -> None:
    for name, run_id in (("north", "a"), ("south", "a"), ("south", "b")):
        attend(name, port, run_id=run_id)
    there(several, "a", "north", "south")
    there(several, "b", "south")
    for run_id, names in (("a", WIDTHS), ("b", ["south"])):
        found = several._services[run_id].ask(["a"], WAIT_S).wait()
        assert [*found] == [*names]
        assert all(isinstance(each, ServingAnswer) for each in found.values())


@pytest.mark.parametrize(
    ("name", "run_id", "code"),
    [
        ("north", "c", Code.RECIPE_DIFFERS),
        ("north", "b", Code.ROLE_MISMATCH),
        ("west", "a", Code.ROLE_MISMATCH),
    ],
)
def test_a_run_that_is_not_served_is_refused(port: str, name: str, run_id: str, code: Code) -> None:
    ended = attend(name, port, run_id=run_id)
    wait_until(lambda: bool(ended))
    with raises(PeerError, code):
        raise ended[0]


def test_a_party_waits_for_a_run_that_comes_and_is_told_once_that_one_goes(
    several: SeveralRuns, port: str, ledger: Ledger
) -> None:
    refused: list[str] = []
    ended = attend("south", port, run_id="c", refused=refused.append)
    wait_until(lambda: refused)
    several.add("c", service_of("c", {"south": 1}, ledger))
    there(several, "c", "south")
    service, before = several._services["c"], len(refused)
    several.remove("c")
    service.close()
    wait_until(lambda: len(refused) > before)
    assert (service.present, ended) == ([], [])


def test_a_party_that_ends_its_stream_has_left(several: SeveralRuns, port: str) -> None:
    attendance = attendance_of("south", port, "b")
    thread = threading.Thread(target=attendance.run, daemon=True)
    thread.start()
    there(several, "b", "south")
    attendance.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    there(several, "b")


def test_streams_that_say_nothing_are_bounded(port: str) -> None:
    with dial(port, credentials("north"), ME) as channel:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        calls = [
            channel.stream_stream(f"/{SERVICE}/Attend")(iter(outbox.get, None))
            for _ in range(2 * MAX_STREAMS + 1)
        ]
        # One of them hears at once that these are too many.
        words: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def hear(call: Iterator[bytes]) -> None:
            # The others end with the test.
            with suppress(grpc.RpcError):
                words.put(next(call))

        for call in calls:
            threading.Thread(target=hear, args=(call,), daemon=True).start()
        word = serving_pb2.FromActive.FromString(words.get(timeout=WAIT_S))
        assert word.failure.code == int(Code.NAME_TAKEN)
        for call in calls:
            call.cancel()
            outbox.put(None)


def test_who_lets_questions_pass_is_waited_for_again_once_it_answers(
    service: ServingService, address: str, ledger: Ledger
) -> None:
    late, away = {"north": "late", "south": "away"}, {"north": "away", "south": "away"}

    def asked() -> int:
        return sum(each.messages for each in ledger.entries() if each.kind == "question")

    def ask() -> None:
        began_s = time.monotonic()
        assert service.ask(["a"], WAIT_S).wait() == away
        assert time.monotonic() - began_s < WAIT_S / 2

    def asks_more(than: int) -> bool:
        ask()
        return asked() > than

    with liar(address) as (heard, say):

        def answer(number: int) -> None:
            given = serving_pb2.Answer(number=number, state=b"\x01", embeddings=b"\x00" * 8)
            say(serving_pb2.FromParty(answer=given))

        say(present())
        next(heard)
        wait_until(lambda: service.present == ["north"])
        # Those that wait yet are given up with the first one.
        others = [service.ask(["a"], WAIT_S) for _ in range(MAX_LATE - 1)]
        assert service.ask(["a"], 0.05).wait() == late
        assert [each.wait() for each in others] == [away] * len(others)
        assert service.present == []
        # The first of these is a probe; while it is under way, no other is sent.
        for _ in range(5):
            ask()
        words = [serving_pb2.FromActive.FromString(next(heard)) for _ in range(MAX_LATE + 1)]
        numbers = [each.question.number for each in words]
        assert numbers == [*range(1, MAX_LATE + 2)]
        assert asked() == len(numbers)
        # An answer that comes late says that it lives, and not that it is in time.
        answer(numbers[0])
        wait_until(lambda: asks_more(len(numbers)))
        assert service.present == []
        answer(serving_pb2.FromActive.FromString(next(heard)).question.number)
        wait_until(lambda: service.present == ["north"])
        pending = service.ask(["a"], WAIT_S)
        answer(serving_pb2.FromActive.FromString(next(heard)).question.number)
        assert isinstance(pending.wait()["north"], ServingAnswer)
        # Who is away is not asked for nothing, but for all.
        for _ in range(MAX_LATE):
            assert service.ask(["a"], 0.0).wait() == late
            next(heard)
        assert service.ask(["a"], WAIT_S, ids_of={"north": []}).wait() == away
        question = serving_pb2.FromActive.FromString(next(heard)).question
        assert question.ids == ["a"]
        answer(question.number)
        wait_until(lambda: service.present == ["north"])


def test_a_party_of_an_older_release_says_no_more_than_another(
    service: ServingService, address: str
) -> None:
    """Older releases send 2 for an id that they refuse, and 3 for features that cannot be used."""
    with liar(address) as (heard, say):
        say(present())
        next(heard)
        wait_until(lambda: service.present == ["north"])
        pending = service.ask(["a", "b", "c", "d"], WAIT_S)
        next(heard)
        values = np.ones(2, "<f4").tobytes()
        answer = serving_pb2.Answer(number=1, state=b"\x00\x01\x02\x03", embeddings=values)
        say(serving_pb2.FromParty(answer=answer))
        found = pending.wait()["north"]
    assert isinstance(found, ServingAnswer)
    assert found.state == bytes((NOT_ANSWERED, EMBEDDED, NOT_ANSWERED, NOT_ANSWERED))


@pytest.mark.parametrize("refuses", ["answer", "record"])
def test_a_refusal_reads_as_an_answer_about_unknown_ids(
    service: ServingService, address: str, refuses: str
) -> None:
    """A failure would tell the active party that an id is known: of others, nothing can fail."""
    written: list[OutgoingMessage] = []

    def answer(ids: Sequence[str], _until_s: float, _step: Step | None) -> ServingAnswer:
        found = embedded(2, ids)
        if refuses == "answer" and EMBEDDED in found.state:
            raise WithheldError("a policy refuses")
        return replace(found, ids=[each for each in ids if each in VALUES])

    def writes(told: OutgoingMessage) -> None:
        if refuses == "record" and told.ids:
            raise InputError(Code.REFUSED, "an account is spent")
        written.append(told)

    attend("north", address, answer=answer, writes=writes)
    wait_until(lambda: service.present == ["north"])
    known, unknown = (service.ask(each, WAIT_S).wait()["north"] for each in (["a"], ["x"]))
    assert known == unknown == ServingAnswer(bytes([NOT_ANSWERED]), b"", "v1")
    # The record has a line for both, with the number of ids that were asked for.
    assert [(each.asked, each.ids, each.numbers) for each in written] == [(1, [], 0)] * 2
