"""Chooses where a process computes, and with how many threads."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl_common.errors import Code, InputError


def resolve_device(text: str) -> torch.device:
    """Returns the device for ``cpu``, ``cuda`` (the first GPU; under torchrun each process has its
    own) or ``cuda:N``.

    Raises InputError: CONFIG_INVALID; DEVICE_MISSING, which lists this machine's devices.
    """
    if text == "cpu":
        return torch.device("cpu")
    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _, size, local = read_launch()
    asked = re.fullmatch(r"cuda(?::(\d{1,4}))?", text)
    if asked and asked[1] and size > 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"device: torchrun has started {size} processes, and each needs its own GPU (got "
            f'{text}). Set device = "cuda", and choose GPUs by CUDA_VISIBLE_DEVICES.',
        )
    number = int(asked[1] or local) if asked else n
    if number < n:
        return torch.device("cuda", number)
    there = ["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(n))]
    raise InputError(
        Code.DEVICE_MISSING,
        f"device: not available for {size} processes (got {text}). Choose a device of this "
        f"machine: {', '.join(there)}."
        if size > 1
        else f"device: not available (got {text}). Choose a device of this machine: "
        f"{', '.join(there)}.",
    )


def read_launch() -> tuple[int, int, int]:
    """Returns (rank, world size, rank on this machine) under torchrun; (0, 1, 0) without it.

    Raises InputError if torchrun's variables have invalid values."""
    if not torch.distributed.is_torchelastic_launched():
        return 0, 1, 0
    words = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    for name, word in words.items():
        if not re.fullmatch(r"\d{1,4}", word, re.ASCII):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{name}: must be a number, because TORCHELASTIC_RUN_ID is set (got "
                f"{word[:20]!r}). Start the party with torchrun, or unset TORCHELASTIC_RUN_ID.",
            )
    rank, size, local = map(int, words.values())
    if rank >= size:
        raise InputError(
            Code.CONFIG_INVALID,
            f"RANK: must be less than WORLD_SIZE, {size} (got {rank}). Start the party with "
            "torchrun.",
        )
    return rank, size, local


def device_name(device: torch.device) -> str:
    """Returns the maker's name for a GPU or this machine's processor; ``cpu`` if the system does
    not say.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Linux has the processor's name here.
    with suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, name = line.partition(":")
            if key.strip() == "model name" and name.strip():
                return name.strip()
    return platform.processor() or "cpu"


def peak_memory(device: torch.device) -> int | None:
    """Returns the most bytes that this process's tensors took on a GPU at once; None on a CPU.

    It counts only this process, so that several parties may share a GPU. The driver's memory and
    torch's reserve come on top.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def set_threads(n: int) -> None:
    """Sets ``n`` threads inside an operation and one between operations. May be called again at any
    time.
    """
    torch.set_num_threads(n)
    if torch.get_num_interop_threads() != 1:
        # Torch allows this once, before the first parallel work.
        with suppress(RuntimeError):
            torch.set_num_interop_threads(1)


def count_threads() -> int:
    """Returns on how many cores this party may compute: what ``set_threads`` has set."""
    return torch.get_num_threads()


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of the generators from which torch draws for a party on ``device``: the
    CPU's, and its GPU's.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores what ``random_states`` returned; on another kind of device, what it has."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def plain_arithmetic() -> Callable[[], None]:
    """Has float32 multiplied in float32, and not in TF32 or bfloat16, and convolutions summed in
    the same order each time; returns what puts torch back as it was.

    cuDNN takes TF32, with 10 bits of precision, for convolutions and recurrent layers unless it is
    told not to, and kernels that add up in any order. ``model.precision`` does not depend on this.
    """
    backends: Any = torch.backends
    order = backends.cudnn.deterministic, backends.cudnn.benchmark
    old = [_flag(torch.get_float32_matmul_precision), _flag(lambda: backends.cudnn.allow_tf32)]
    operations = [
        *(backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul),
        *(backends.mkldnn.conv, backends.mkldnn.rnn, backends.mkldnn.matmul),
    ]
    before = [operation.fp32_precision for operation in operations]

    def flags(matmul: Any, cudnn: Any) -> None:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn

    def each_is(words: list[str]) -> None:
        for operation, word in zip(operations, words, strict=True):
            if operation.fp32_precision != word:
                operation.fp32_precision = word

    # Both: the flags alone give way to what torch.backends.fp32_precision says, and reading a flag
    # of another value than that of its operations is an error in torch.
    flags("highest", False)
    each_is(["ieee"] * len(operations))
    backends.cudnn.deterministic, backends.cudnn.benchmark = True, False

    def back() -> None:
        backends.cudnn.deterministic, backends.cudnn.benchmark = order
        flags(*old)
        each_is(before)

    return back


def _flag(read: Callable[[], Any]) -> Any:
    """Returns a flag of torch; None if its operations have been set separately, which torch refuses
    to read as one.
    """
    try:
        return read()
    except RuntimeError:
        return None


def keep_freed_memory() -> None:
    """Lets glibc keep up to 128 MiB of freed memory for the next step; other C libraries are left
    as they are.

    Otherwise glibc gives a step's tensors and frames of some megabytes back to the system and
    faults them in again, page by page: 3 % fewer steps with embeddings of 4 MiB. Blocks above 32
    MiB, as of tables that are read, are given back. Settings in the environment (``MALLOC_…``) take
    precedence.
    """
    # The numbers of the settings are from malloc.h.
    settings = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 20)}
    if platform.libc_ver()[0] == "glibc" and settings.keys().isdisjoint(os.environ):
        for number, size in settings.values():
            ctypes.CDLL(None).mallopt(number, size)


def index_on(rows: Tensor, device: torch.device) -> Tensor:
    """Returns row numbers on ``device``; they are on the CPU or there already.

    Copied from ordinary memory, they would make the host wait until the GPU has done all its work
    so far. torch keeps a pinned block that it has made itself until the copies out of it are done.
    """
    return (
        rows if rows.device.type == device.type else rows.pin_memory().to(device, non_blocking=True)
    )
