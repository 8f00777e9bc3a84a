"""Checks the rendezvous with which torchrun's processes find each other.

The state of torch's c10d rendezvous is a pickle in a store that listens on all addresses of the
host without authentication. So anyone who reaches its port can run code in torchrun, as the party's
user. A loopback endpoint does not prevent this. torchrun uses this rendezvous with
``--standalone``, and on one host also without ``--master-port``. The store of the static rendezvous
contains no pickle.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from vfl_common.errors import Code, InputError

_PROGRAMS = ("torchrun", "torch.distributed.run")
# The maximum number of shells between torchrun and this process.
_MAX_SHELLS = 8


def require_static() -> None:
    """Raises InputError if torchrun has started this process under a rendezvous that unpickles data
    from the network.
    """
    if not torch.distributed.is_torchelastic_launched():
        return
    backend = read_backend(_find_launcher())
    if backend == "static":
        return
    raise InputError(
        Code.CONFIG_INVALID,
        "torchrun: this rendezvous lets anyone who reaches its port run code here (got "
        f"{backend}). Set --master-addr 127.0.0.1 and a free --master-port in place of "
        "--standalone or --rdzv-backend; with several hosts, set the first one's address and "
        "--node-rank, on a network of these hosts only.",
    )


def read_backend(command: Sequence[str]) -> str:
    """Returns the backend of the rendezvous that a torchrun command uses, with the ``PET_``
    variables of the environment. A command of another program counts as static, unless these
    variables name a backend.
    """
    # This module takes long to import, and most parties have one process and do not need it.
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    index = _find_torchrun(command)
    words = [*command[index + 1 :]] if index is not None else ["none"]
    try:
        # The parser raises SystemExit at an unknown option.
        with contextlib.redirect_stderr(io.StringIO()):
            args = get_args_parser().parse_args(words)
    except SystemExit:
        return "static"
    if args.standalone:
        return "c10d"
    is_one_host = index is not None and parse_min_max_nnodes(args.nnodes)[1] == 1
    if args.rdzv_backend == "static" and is_one_host and not args.rdzv_endpoint:
        return "static" if args.master_port is not None else "c10d"
    return str(args.rdzv_backend)


def _find_torchrun(command: Sequence[str]) -> int | None:
    """Returns the index of torchrun in a command, after which its options begin; None if it is the
    command of another program.
    """
    names = [Path(word).name for word in command]
    return next((names.index(program) for program in _PROGRAMS if program in names), None)


def _find_launcher() -> list[str]:
    """Returns the command of the torchrun that has started this process, directly or through
    shells; empty if there is none, or if the system does not show commands.
    """
    pid = os.getppid()
    for _ in range(_MAX_SHELLS):
        try:
            data = Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            break
        command = [word.decode(errors="replace") for word in data.rstrip(b"\0").split(b"\0")]
        # A shell's command may name torchrun in one long word.
        if _find_torchrun(command) is not None:
            return command
        pid = int(status.partition("PPid:")[2].split()[0])
    return []
