"""The hand-over of a program's sockets to a new process of it."""

from __future__ import annotations

import socket

import pytest

from vfl_common.errors import Code, InputError
from vfl_common.process.handover import Predecessor


def test_a_process_whose_predecessor_is_killed_in_the_handover_says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # The word that this process has loaded goes out; then the other one is gone.
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(InputError, match="ended without handing over") as refused:
            Predecessor(ours, {}).wait()
        assert refused.value.code == Code.ADDRESS_IN_USE
        assert theirs.recv(16) == b"loaded"
