"""The parts of the transport that need no transport: decisions, failures, the kernel's counts,
addresses.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness.errors import assert_names, raises
from vfl_common.bundle import TcpCount
from vfl_common.errors import (
    CATALOGUE,
    AbortedError,
    Code,
    InputError,
    InternalError,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.files import write_error
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.process.handover import Predecessor, get_command
from vfl_common.rpc import counters as tcp
from vfl_common.rpc.channel import check_address
from vfl_common.rpc.counters import TcpMeter, normalise_address, parse_endpoint
from vfl_common.rpc.exchange.hub import KeepWaiting, Patience, Proceed, TimedOut, decide
from vfl_common.rpc.guard import compute_connection_limit
from vfl_common.rpc.messages import from_failure, to_failure
from vfl_common.rpc.uplink import check_start

ROSTER = ("north", "south", "west")

# -- arrivals


@pytest.mark.parametrize(
    ("waited_s", "arrived", "decision"),
    [
        (0.0, (), KeepWaiting(10.0)),
        (9.5, ("south",), KeepWaiting(0.5)),
        (10.0, ("south",), TimedOut(("north", "west"))),
        (11.0, (), TimedOut(ROSTER)),
        (0.0, ("west", "south", "north"), Proceed()),
        # All are there: however late it is.
        (99.0, ROSTER, Proceed()),
    ],
)
def test_whether_a_step_goes_on(
    waited_s: float, arrived: tuple[str, ...], decision: object
) -> None:
    assert decide(waited_s, arrived, ROSTER, 10.0) == decision


def test_a_step_without_parties_goes_on() -> None:
    assert decide(0.0, (), (), 10.0) == Proceed()


def test_a_deadline_leaves_the_late_out() -> None:
    assert decide(1.0, ("north",), ROSTER, 10.0, 2.0) == KeepWaiting(1.0)
    assert decide(2.0, ("north",), ROSTER, 10.0, 2.0) == Proceed()
    assert decide(2.0, (), ROSTER, 10.0, 2.0) == Proceed()
    assert decide(10.0, ("north",), ROSTER, 10.0, 20.0) == TimedOut(
        tuple(each for each in ROSTER if each != "north")
    )


@pytest.mark.parametrize(
    ("waited_s", "arrived", "away", "at_least", "decision"),
    [
        # The others are there.
        (0.0, ("north", "west"), ("south",), 0, Proceed()),
        # West is not away, so it has until the deadline.
        (0.0, ("north",), ("south",), 0, KeepWaiting(2.0)),
        (2.0, ("north",), ("south",), 0, Proceed()),
        # The active party has features of its own.
        (0.0, (), ROSTER, 0, Proceed()),
        # It has none: somebody must come.
        (5.0, (), ROSTER, 1, KeepWaiting(5.0)),
        (10.0, (), ROSTER, 1, TimedOut(ROSTER)),
    ],
)
def test_a_party_that_is_away_is_not_waited_for(
    waited_s: float,
    arrived: tuple[str, ...],
    away: tuple[str, ...],
    at_least: int,
    decision: object,
) -> None:
    assert decide(waited_s, arrived, ROSTER, 10.0, 2.0, away=away, min_parties=at_least) == decision


def test_a_step_without_a_deadline_waits_for_who_is_away() -> None:
    assert decide(0.0, ("north", "west"), ROSTER, 10.0, away=("south",)) == KeepWaiting(10.0)


def test_a_party_that_comes_back_is_waited_for_again() -> None:
    patience = Patience()
    patience.note_missed("north", 100.0, 2.0)
    assert patience.away == {"north"}
    patience.note_return("north", 100.5)
    assert patience.away == frozenset()
    # After more than nine deadlines: forgiven.
    patience.note_missed("north", 118.6, 2.0)
    patience.note_return("north", 118.7)
    assert patience.away == frozenset()


def test_a_party_that_is_late_again_and_again_costs_the_others_a_tenth_of_their_time() -> None:
    deadline_s, now_s, waited_s, patience = 2.0, 0.0, 0.0, Patience()
    # It comes back at once, and is late at once.
    while now_s < 1000.0:
        if "slow" not in patience.away:
            now_s, waited_s = now_s + deadline_s, waited_s + deadline_s
        else:
            now_s += 0.01
        patience.note_missed("slow", now_s, deadline_s)
        patience.note_return("slow", now_s)
    assert 80.0 < waited_s < 105.0


# -- failures

SECRET = "/home/hospital/patients.csv: id 4711 has column 'hiv'"


@pytest.mark.parametrize("code", Code)
def test_a_peer_reads_the_public_text_alone(code: Code) -> None:
    failure = to_failure(VflError(code, SECRET, party="north"))
    assert (failure.code, failure.message, failure.party) == (code, CATALOGUE[code].public, "north")
    assert b"hospital" not in failure.SerializeToString()


@pytest.mark.parametrize("error", [PeerError, LostError])
def test_a_type_that_is_shared_shows_its_text_and_not_what_is_added_privately(
    error: type[VflError],
) -> None:
    told = error(Code.TENSOR_MISMATCH, "shapes differ", party="north").privately(SECRET)
    assert str(told) == SECRET
    failure = to_failure(told)
    assert_names(failure.message, "differ")
    assert b"hospital" not in failure.SerializeToString()


def test_a_full_disk_is_told_without_its_path() -> None:
    told = write_error(
        Path("/home/hospital/runs"), OSError(errno.ENOSPC, "No space left on device")
    )
    assert "/home/hospital/runs" in str(told)
    assert_names(to_failure(told).message, "written")


def test_what_no_message_can_hold_is_left_out() -> None:
    assert (
        to_failure(PeerError(Code.RECIPE_DIFFERS, "differs at \ud800\x1b.x")).message
        == "differs at   .x"
    )
    told = write_error(Path("/home/hospital/runs"), OSError(errno.EACCES, "Permission denied"))
    assert to_failure(told).message == CATALOGUE[told.code].public


@pytest.mark.parametrize(
    "error", [KeyError(SECRET), MemoryError(SECRET), KeyboardInterrupt(SECRET), OSError(2, SECRET)]
)
def test_any_other_exception_is_an_internal_error(error: BaseException) -> None:
    failure = to_failure(error)
    assert failure.code == Code.INTERNAL
    assert b"hospital" not in failure.SerializeToString()


def test_the_cause_of_an_error_stays_here_too() -> None:
    error = InternalError("lookup")
    error.__cause__ = KeyError(SECRET)
    assert b"hospital" not in to_failure(error).SerializeToString()


@pytest.mark.parametrize("code", Code)
def test_a_failure_keeps_its_code_for_whom_it_is_about(code: Code) -> None:
    error = from_failure(
        to_failure(VflError(code, SECRET, party="north")), sender="active", me="north"
    )
    assert error.code is code
    kind = {
        Code.INTERRUPTED: InterruptedRun,
        Code.PARTY_LOST: LostError,
        Code.STEP_TIMEOUT: LostError,
    }
    assert type(error) is kind.get(code, PeerError)
    assert error.exit_code == CATALOGUE[code].exit_code


@pytest.mark.parametrize("code", Code)
def test_what_another_party_did_stops_this_one(code: Code) -> None:
    error = from_failure(
        to_failure(VflError(code, SECRET, party="south")), sender="active", me="north"
    )
    if code is Code.INTERRUPTED:
        assert isinstance(error, InterruptedRun)
    elif code in (Code.PARTY_LOST, Code.STEP_TIMEOUT):
        assert isinstance(error, LostError)
        assert (error.party, error.exit_code) == ("south", 3)
    else:
        assert isinstance(error, AbortedError)
        assert (error.party, error.exit_code) == ("south", 4)
        assert "south" in str(error)


@pytest.mark.parametrize("code", [0, 999, -5])
def test_a_code_that_is_not_known_is_an_internal_error(code: int) -> None:
    error = from_failure(failure_pb2.Failure(code=code, party="north"), sender="active", me="north")  # type: ignore[arg-type]
    assert error.code is Code.INTERNAL
    assert CATALOGUE[Code.INTERNAL].public in str(error)


def test_a_code_of_a_later_release_keeps_its_sentence() -> None:
    failure = failure_pb2.Failure(code=max(Code) + 1, message="an address is not host:port")  # type: ignore[arg-type]
    error = from_failure(failure, sender="active", me="north")
    assert_names(str(error), "active", "an address is not host:port")


@pytest.mark.parametrize(
    "error", [InputError(Code.FILE_INVALID, SECRET), InternalError(SECRET), KeyError(SECRET)]
)
def test_what_goes_wrong_at_the_sender_is_about_the_sender(error: Exception) -> None:
    found = from_failure(to_failure(error), sender="active", me="north")
    assert isinstance(found, AbortedError)
    assert (found.party, found.exit_code) == ("active", 4)
    assert_names(str(found), "details")


def test_a_failure_without_end_is_cut() -> None:
    failure = failure_pb2.Failure(code=Code.TENSOR_MISMATCH, message="x" * 100_000)  # type: ignore[arg-type]
    assert len(str(from_failure(failure, sender="active", me="north"))) < 600


# -- the kernel's counts


@contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as ours,
        listener.accept()[0] as theirs,
    ):
        yield ours, theirs


def read(sock: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(sock.recv(nbytes))


def counted(meter: TcpMeter, peer: str, sent: int, received: int) -> TcpCount:
    """The meter's only count, once it is as given (an acknowledgement may be on its way)."""
    give_up_s = time.monotonic() + 5.0
    while True:
        meter.sample()
        (count,) = meter.counts()
        if count == TcpCount(peer, sent, received):
            return count
        assert time.monotonic() < give_up_s, count
        time.sleep(0.005)


def test_the_kernel_counts_both_ways() -> None:
    """Both ends are in this process: a meter sees both sockets, and counts the one whose far end it
    has a name for.
    """
    with connection() as (ours, theirs):
        here, there = TcpMeter(), TcpMeter()
        here.name_address(f"127.0.0.1:{theirs.getsockname()[1]}", "active")
        there.name_caller(f"ipv4:127.0.0.1:{ours.getsockname()[1]}", "north")
        ours.sendall(bytes(100_000))
        read(theirs, 100_000)
        theirs.sendall(bytes(3_000))
        read(ours, 3_000)
        counted(here, "active", 100_000, 3_000)
        last = counted(there, "north", 3_000, 100_000)
    there.sample()
    # A closed socket's counts stay.
    assert there.counts() == [last]


def test_the_end_of_a_connection_is_no_byte() -> None:
    """Linux counts the SYN of who dials, and each FIN, as a byte."""
    with connection() as (ours, theirs):
        here, there = TcpMeter(), TcpMeter()
        here.name_address(f"127.0.0.1:{theirs.getsockname()[1]}", "active")
        there.name_caller(f"ipv4:127.0.0.1:{ours.getsockname()[1]}", "north")
        ours.sendall(bytes(1_000))
        read(theirs, 1_000)
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(1) == b""
        counted(here, "active", 1_000, 0)
        counted(there, "north", 0, 1_000)


def test_several_connections_to_a_peer_are_one_count() -> None:
    meter = TcpMeter()
    with connection() as (first, first_peer), connection() as (second, second_peer):
        for ours, theirs, nbytes in ((first, first_peer, 1_000), (second, second_peer, 500)):
            meter.name_address(f"localhost:{theirs.getsockname()[1]}", "active")
            theirs.sendall(bytes(nbytes))
            read(ours, nbytes)
        meter.sample()
    (count,) = meter.counts()
    assert (count.peer, count.received_bytes) == ("active", 1_500)


def test_connections_to_nobody_known_are_left_out() -> None:
    meter = TcpMeter()
    with connection():
        meter.sample()
    assert meter.counts() == []


@pytest.mark.parametrize(
    ("words", "host"), [("ipv4:10.0.0.7:4711", "10.0.0.7"), ("ipv6:%5B::1%5D:4711", "::1")]
)
def test_callers_as_grpc_writes_them(words: str, host: str) -> None:
    meter = TcpMeter()
    meter.name_caller(words, "north")
    assert meter._callers == {(host, 4711): "north"}


@pytest.mark.parametrize("words", ["", "unix:", "unix:/tmp/socket", "ipv4:10.0.0.7", "nonsense"])
def test_callers_that_are_no_tcp_have_no_name(words: str) -> None:
    meter = TcpMeter()
    meter.name_caller(words, "north")
    assert meter._callers == {}


def test_a_host_that_is_not_known_has_no_name() -> None:
    meter = TcpMeter()
    with mock.patch("socket.getaddrinfo", side_effect=socket.gaierror):
        meter.name_address("nowhere.invalid:80", "active")
    assert meter._dialled_peers == {}


def test_an_ipv4_address_looks_the_same_on_an_ipv6_socket() -> None:
    assert tcp.normalise_address(("::ffff:10.0.0.7", 80, 0, 0)) == tcp.normalise_address(
        ("10.0.0.7", 80)
    )


def test_the_fields_lie_where_linux_puts_them() -> None:
    """tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info: 8 bytes, then 24 of 4, then two
    of 8 of pacing.
    """
    assert struct.calcsize("=8B24I2Q") == tcp._COUNTS_OFFSET


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EMFILE])
def test_where_files_cannot_be_listed_counts_stay_as_they_are(number: int) -> None:
    """Without /proc, or with too many open files, which a stranger can bring about: counting ends
    no run.
    """
    meter = TcpMeter()
    with connection() as (ours, theirs):
        theirs.sendall(bytes(100))
        read(ours, 100)
        meter.sample()
        with mock.patch("pathlib.Path.iterdir", side_effect=OSError(number, "no")):
            meter.sample()
        meter.name_address(f"127.0.0.1:{theirs.getsockname()[1]}", "active")
    (count,) = meter.counts()
    assert count.received_bytes == 100


def of_others() -> set[Any]:
    """The connections of this process: another test's may still be open."""
    meter = TcpMeter()
    meter.sample()
    return set(meter._counts)


def test_connections_of_nobody_are_forgotten_once_they_are_closed() -> None:
    others, meter = of_others(), TcpMeter()
    with connection() as (_, theirs):
        meter.sample()
        assert meter._counts
        named = f"127.0.0.1:{theirs.getsockname()[1]}"
        # After a sample.
        meter.name_address(named, "active")
    with connection():
        meter.sample()
    meter.sample()
    assert meter._counts.keys() <= others
    assert len(meter.counts()) == 1


def test_callers_are_forgotten_once_their_connections_are_closed_and_their_sums_are_not() -> None:
    """Otherwise a party that connects again and again makes the meter grow."""
    others, meter = of_others(), TcpMeter()
    for _ in range(5):
        with connection() as (ours, theirs):
            meter.name_caller(f"ipv4:127.0.0.1:{ours.getsockname()[1]}", "north")
            ours.sendall(bytes(100))
            read(theirs, 100)
            meter.sample()
    # Whose connection was closed before any look.
    meter.name_caller("ipv4:127.0.0.1:1", "south")
    meter.sample()
    (count,) = meter.counts()
    assert (count.peer, count.received_bytes) == ("north", 500)
    assert meter._callers == {}
    assert meter._counts.keys() <= others


# -- limits


@pytest.mark.parametrize(
    ("streams", "files", "most"), [(22, 65_536, 1_022), (22, 256, 128), (900, 1_024, 512)]
)
def test_how_many_connections_are_accepted(streams: int, files: int, most: int) -> None:
    assert compute_connection_limit(streams, files) == most


@pytest.mark.parametrize(
    ("before", "after", "warned"),
    [((256, 512), 512, True), ((256, 2_000), 2_000, False), ((1_500, 1_500), 1_500, False)],
)
def test_the_limit_of_files_is_raised_as_far_as_it_may(
    before: tuple[int, int], after: int, warned: bool
) -> None:
    program = (
        "import resource\n"
        "from vfl_common.files import raise_file_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {before})\n"
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == [str(after), str(after), str(before[1])]
    assert (f"may open only {after} files" in ended.stderr) == warned


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such arenas"
)
@pytest.mark.parametrize("shared", [True, False])
def test_threads_share_two_arenas(shared: bool) -> None:
    program = (
        "import ctypes, threading\n"
        "from vfl_common.rpc.guard import share_arenas\n"
        f"{'share_arenas()' if shared else ''}\n"
        "libc, met = ctypes.CDLL(None), threading.Barrier(6)\n"
        "threads = [threading.Thread(target=lambda: (libc.malloc(99), met.wait())) for _ "
        "in range(6)]\n"
        "[each.start() for each in threads]\n"
        "[each.join() for each in threads]\n"
        "libc.malloc_stats()\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert (ended.stderr.count("Arena ") <= 2) == shared, ended.stderr


# -- addresses


def test_an_address_in_use_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with raises(InputError, Code.ADDRESS_IN_USE, names="127.0.0.1"):
            check_address(f"127.0.0.1:{port}")
    check_address("127.0.0.1:0")


def test_a_host_that_cannot_be_resolved_is_an_invalid_address() -> None:
    with raises(InputError, Code.ADDRESS_INVALID, names="no.such.host.invalid"):
        check_address("no.such.host.invalid:0")


def test_an_address_of_another_machine_is_said_so() -> None:
    with raises(InputError, Code.ADDRESS_IN_USE, names="192.0.2.1"):
        check_address("192.0.2.1:0")


def test_a_caller_of_this_link_alone_is_known_by_one_address() -> None:
    """gRPC gives the link's number with the address, the kernel beside it."""
    assert (
        parse_endpoint("ipv6:%5Bfe80::1%254%5D:7000")
        == normalise_address(("fe80::1", 7000, 0, 4))
        == ("fe80::1", 7000)
    )


def test_a_process_whose_predecessor_is_killed_in_the_handover_says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # The word that this process has loaded goes out; then the other one is gone.
        theirs.shutdown(socket.SHUT_WR)
        with raises(InputError, Code.ADDRESS_IN_USE, names="ended without handing over"):
            Predecessor(ours, {}).wait()
        assert theirs.recv(16) == b"loaded"


# -- what a server says when a generation begins: names of folders, and words for people


@pytest.mark.parametrize(
    "said",
    [
        {"run_id": "../up"},
        {"checkpoint": "a/b"},
        {"left": ["p1\nerror: a line of its own"]},
        {"shown": {"p1\x1b[31m": ""}},
        {"shown": {"": ""}},
    ],
    ids=["run", "checkpoint", "left", "shown", "nobody"],
)
def test_a_server_may_not_give_any_name(said: dict[str, Any]) -> None:
    good = control_pb2.Start(run_id="run", generation=1, left=["p2"], shown={"p1": "{"})
    assert check_start(good, server="server", me="p1", oldest=1, newest=9).shown == {"p1": "{"}
    start = control_pb2.Start(**{"run_id": "run", "generation": 1, **said})
    with raises(PeerError, Code.MALFORMED_MESSAGE):
        check_start(start, server="server", me="p1", oldest=1, newest=9)


def test_a_script_at_a_link_is_started_with_the_release_to_which_the_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in ("old", "new"):
        script = tmp_path / release / "bin" / "vfl-party"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\necho {release} $*\n")
        script.chmod(0o755)
    link = tmp_path / "vfl"
    link.symlink_to("old")
    words = [str(link / "bin" / "vfl-party"), "serve", "bank.toml"]
    monkeypatch.setattr(sys, "orig_argv", ["/opt/old/bin/python3", *words])
    link.unlink()
    link.symlink_to("new")
    assert subprocess.check_output(get_command(), text=True) == "new serve bank.toml\n"


def test_a_module_is_started_with_the_same_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vfl_party", "serve"])
    assert get_command() == [sys.executable, "-m", "vfl_party", "serve"]
