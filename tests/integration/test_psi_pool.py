"""Workers that mask: other processes, with the errors of this one, that know the secret and outlive
nobody.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

from tests.harness.errors import raises
from tests.harness.waiting import WAIT_S, wait_until
from vfl_common.errors import Code, InternalError, PeerError
from vfl_party.psi import worker
from vfl_party.psi.curve import hash_ids, mask
from vfl_party.psi.pool import Masking

SECRET, SALT = bytes(range(100, 132)), b"salt of a run"
IDS = ["1", "Jürgen", "", "person 4"]

# A parent that says who its workers are, keeps one of them busy, and waits for its end.
PARENT = """
import psutil
from vfl_party.psi.pool import Masking
with Masking(bytes(range(100, 132)), b"salt of a run", 2) as masking:
    masking.mask_own(["1"]).result()
    busy = masking.mask_own([str(number) for number in range(20_000)])
    print(*(each.pid for each in psutil.Process().children()), flush=True)
    input()
"""


@pytest.fixture(scope="module")
def masking() -> Iterator[Masking]:
    with Masking(SECRET, SALT, 2) as pool:
        yield pool


def ours() -> list[psutil.Process]:
    """Returns the workers. A process has no command line in the moment in which its program
    begins.
    """
    found = wait_until(
        lambda: {each: each.cmdline() for each in psutil.Process().children() if runs(each)},
        lambda lines: all(lines.values()),
    )
    return [each for each, line in found.items() if "vfl_party.psi.worker" in line]


def runs(process: psutil.Process) -> bool:
    try:
        # Nobody may be there to reap it.
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_masks_as_this_process_would(masking: Masking) -> None:
    own = masking.mask_own(IDS).result(WAIT_S)
    assert own == mask(hash_ids([each.encode() for each in IDS], SALT), SECRET)
    assert masking.mask_received(own, "shop").result(WAIT_S) == mask(own, SECRET)
    assert (
        masking.mask_own([]).result(WAIT_S)
        == masking.mask_received(b"", "shop").result(WAIT_S)
        == b""
    )


def test_many_batches_come_back_in_their_places(masking: Masking) -> None:
    batches = [[f"{batch}:{row}" for row in range(batch % 7)] for batch in range(50)]
    futures = [masking.mask_own(each) for each in batches]
    expected = [
        mask(hash_ids([each.encode() for each in batch], SALT), SECRET) for batch in batches
    ]
    assert [each.result(WAIT_S) for each in futures] == expected


def test_a_large_batch(masking: Masking) -> None:
    """More than a socket's buffers hold, both ways."""
    ids = [f"{number:0200d}" for number in range(10_000)]
    points = masking.mask_own(ids).result(WAIT_S)
    assert len(points) == 320_000
    assert points[-32:] == mask(hash_ids([ids[-1].encode()], SALT), SECRET)


def test_a_peers_error_comes_back_as_itself(masking: Masking) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="shop", party="shop") as caught:
        masking.mask_received(bytes(32), "shop").result(WAIT_S)
    assert caught.value.public == str(caught.value)
    # And the worker goes on.
    assert masking.mask_own(["1"]).result(WAIT_S)


def test_workers_are_small_processes_whose_secret_nobody_sees(masking: Masking) -> None:
    wait([masking.mask_own(["1"]) for _ in range(8)], WAIT_S)
    workers = ours()
    assert len(workers) == 2
    for each in workers:
        assert each.pid != os.getpid()
        assert each.memory_info().rss < 100 * 2**20
        for file in ("cmdline", "environ"):
            said = Path(f"/proc/{each.pid}/{file}").read_bytes()
            assert said
            for secret in (SECRET, SALT):
                assert secret not in said
                assert secret.hex().encode() not in said


def test_signals_to_all_processes_are_the_parents_to_decide_about(masking: Masking) -> None:
    wait([masking.mask_own(["1"]) for _ in range(8)], WAIT_S)
    for each in ours():
        assert os.getpgid(each.pid) != os.getpgid(0)
        each.send_signal(signal.SIGINT)
        each.send_signal(signal.SIGTERM)
    assert all(masking.mask_own(IDS).result(WAIT_S) for _ in range(8))
    assert len(ours()) == 2


def test_the_end_leaves_no_process_and_no_future() -> None:
    before = ours()
    with Masking(SECRET, SALT, 2) as masking:
        new = [each for each in ours() if each not in before]
        assert len(new) == 2
        for each in new:
            each.suspend()
        futures = [masking.mask_own(IDS) for _ in range(10)]
    assert ours() == before
    assert all(each.done() for each in futures)
    assert {type(each.exception()) for each in futures if not each.cancelled()} <= {InternalError}
    assert sum(each.cancelled() for each in futures) >= 8


def test_a_worker_that_is_killed_is_replaced_and_its_batch_is_masked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = ours()
    with Masking(SECRET, SALT, 1) as masking:
        own = masking.mask_own(IDS).result(WAIT_S)
        (victim,) = (each for each in ours() if each not in before)
        victim.suspend()
        busy = masking.mask_own(IDS)
        victim.kill()
        assert busy.result(WAIT_S) == masking.mask_own(IDS).result(WAIT_S) == own
        (said,) = (each.getMessage() for each in caplog.records)
        assert (
            said
            == f"process {victim.pid}, which masked ids, has ended; another one takes its place"
        )
        assert len([each for each in ours() if each not in before]) == 1


def test_batches_that_no_worker_survives_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "__name__", "vfl_party.psi.no_such_module")
    with Masking(SECRET, SALT, 1) as masking, raises(InternalError, Code.INTERNAL):
        masking.mask_own(IDS).result(WAIT_S)


def test_workers_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    wait_until(lambda: [each for each in workers if runs(each)], lambda left: not left)
