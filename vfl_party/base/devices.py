"""Chooses the device, the threads and the dtypes of a process, and seeds torch's generators, so
that models get the same initial weights in every run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import DType
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base.seeds import SECRET

TORCH: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}
WIRE: dict[torch.dtype, DType] = {dtype: wire for wire, dtype in TORCH.items()}
T = TypeVar("T")
R = TypeVar("R")
# The maximum number of threads. More threads would only wait for the disk.
MAX_THREADS = 8
# The number of 32-bit words in a Mersenne Twister's state, and the offset in bytes of the first
# word in torch's state, where each word takes 8 bytes.
_WORDS, _FIRST = 624, 24


def resolve_device(text: str) -> torch.device:
    """Returns the device for ``cpu``, ``cuda`` or ``cuda:N``. ``cuda`` is the first GPU; under
    torchrun it is the GPU of this process.

    Raises InputError: CONFIG_INVALID if torchrun is used with ``cuda:N``; DEVICE_MISSING if this
    machine does not have the device.
    """
    if text == "cpu":
        return torch.device("cpu")
    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _, size, local = read_launch()
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", text)
    if match and match[1] and size > 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"device: torchrun has started {size} processes, and each needs its own GPU (got "
            f'{text}). Set device = "cuda", and choose GPUs by CUDA_VISIBLE_DEVICES.',
        )
    number = int(match[1] or local) if match else n
    if number < n:
        return torch.device("cuda", number)
    devices = ["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(n))]
    raise InputError(
        Code.DEVICE_MISSING,
        f"device: not available for {size} processes (got {text}). Choose a device of this "
        f"machine: {', '.join(devices)}."
        if size > 1
        else f"device: not available (got {text}). Choose a device of this machine: "
        f"{', '.join(devices)}.",
    )


def read_launch() -> tuple[int, int, int]:
    """Returns the rank, the world size and the local rank under torchrun; (0, 1, 0) without it.

    Raises InputError if torchrun's variables have invalid values.
    """
    if not torch.distributed.is_torchelastic_launched():
        return 0, 1, 0
    variables = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    for name, value in variables.items():
        if not re.fullmatch(r"\d{1,4}", value, re.ASCII):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{name}: must be a number, because TORCHELASTIC_RUN_ID is set (got "
                f"{value[:20]!r}). Start the party with torchrun, or unset TORCHELASTIC_RUN_ID.",
            )
    rank, size, local = map(int, variables.values())
    if rank >= size:
        raise InputError(
            Code.CONFIG_INVALID,
            f"RANK: must be less than WORLD_SIZE, {size} (got {rank}). Start the party with "
            "torchrun.",
        )
    return rank, size, local


def get_device_name(device: torch.device) -> str:
    """Returns the product name of a GPU or of this machine's processor; ``cpu`` if the name is
    unknown.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # On Linux, this file has the name of the processor.
    with suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, name = line.partition(":")
            if key.strip() == "model name" and name.strip():
                return name.strip()
    return platform.processor() or "cpu"


def get_peak_memory(device: torch.device) -> int | None:
    """Returns the peak memory of this process's tensors on a GPU, in bytes; None on a CPU.

    Only this process is counted, because several parties may share a GPU. The memory of the driver
    and torch's unused reserve are not included.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def set_threads(n: int) -> None:
    """Sets ``n`` threads within an operation, and one thread for parallel operations. May be called
    at any time.
    """
    torch.set_num_threads(n)
    if torch.get_num_interop_threads() != 1:
        # torch allows this call only once, before the first parallel operation.
        with suppress(RuntimeError):
            torch.set_num_interop_threads(1)


def count_threads() -> int:
    """Returns the number of threads that ``set_threads`` has set."""
    return torch.get_num_threads()


def get_random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's random generators for a party on ``device``: the CPU's state,
    and the state of the party's GPU.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores the states that ``get_random_states`` returned; ignores a GPU's state on a CPU."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def plain_arithmetic() -> Callable[[], None]:
    """Makes torch multiply float32 numbers in full precision and sum convolutions in a fixed order.
    Returns a function that restores the previous settings.

    By default, cuDNN uses TF32, with 10 bits of precision, for convolutions and recurrent layers,
    and kernels that sum in any order. ``model.precision`` does not depend on this.
    """
    backends: Any = torch.backends
    old_order = backends.cudnn.deterministic, backends.cudnn.benchmark
    old_flags = [
        _read_flag(torch.get_float32_matmul_precision),
        _read_flag(lambda: backends.cudnn.allow_tf32),
    ]
    operations = [
        *(backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul),
        *(backends.mkldnn.conv, backends.mkldnn.rnn, backends.mkldnn.matmul),
    ]
    old_precisions = [operation.fp32_precision for operation in operations]

    def set_flags(matmul: Any, cudnn: Any) -> None:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn

    def set_precisions(precisions: list[str]) -> None:
        for operation, precision in zip(operations, precisions, strict=True):
            if operation.fp32_precision != precision:
                operation.fp32_precision = precision

    # Both are needed: torch.backends.fp32_precision overrides the flags, and torch raises an error
    # if a flag is read that differs from the setting of its operations.
    set_flags("highest", False)
    set_precisions(["ieee"] * len(operations))
    backends.cudnn.deterministic, backends.cudnn.benchmark = True, False

    def restore() -> None:
        backends.cudnn.deterministic, backends.cudnn.benchmark = old_order
        set_flags(*old_flags)
        set_precisions(old_precisions)

    return restore


def _read_flag(read: Callable[[], Any]) -> Any:
    """Returns a flag of torch; None if torch raises an error because its operations have different
    settings.
    """
    try:
        return read()
    except RuntimeError:
        return None


def keep_freed_memory() -> None:
    """Lets glibc keep up to 128 MiB of freed memory for the next step. Has no effect with other C
    libraries.

    Otherwise glibc returns the memory of tensors of some megabytes to the system after each step
    and requests it again, which costs 3 % of the steps with embeddings of 4 MiB. Blocks above 32
    MiB, such as tables, are still returned. Settings in the environment (``MALLOC_…``) take
    precedence.
    """
    # The first number of each setting is its constant in malloc.h.
    settings = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 20)}
    if platform.libc_ver()[0] == "glibc" and settings.keys().isdisjoint(os.environ):
        for number, size in settings.values():
            ctypes.CDLL(None).mallopt(number, size)


def copy_index(rows: Tensor, device: torch.device) -> Tensor:
    """Copies row numbers to ``device`` without waiting, unless they are already there.

    A copy from ordinary memory would make the host wait until the GPU has finished all its work so
    far, so the copy is made from pinned memory. torch keeps the pinned block until the copy is
    done.
    """
    return (
        rows if rows.device.type == device.type else rows.pin_memory().to(device, non_blocking=True)
    )


def get_real_dtype() -> torch.dtype:
    """Returns the dtype of parameters, inputs, losses and real numbers in messages: float32.

    Only exactness tests replace it with float64 (``tests/harness/preloaded/float64.py``), so that a
    deviation of 1e-12 is an error of the program and not a rounding error.
    """
    return TORCH[DType.FLOAT32]


@cache
def _get_pool(process: int) -> ThreadPoolExecutor:
    """Returns the thread pool of a process. A forked process needs its own pool, because it does
    not inherit threads.
    """
    count = min(MAX_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, thread_name_prefix=f"vfl-rows-{process}")


def map_in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yields ``work(item)`` for each item in order, computed by several threads.

    Only a few results are computed ahead. Raises the exception of the first item that fails.
    """
    pool, step = _get_pool(os.getpid()), 8 * MAX_THREADS
    for start in range(0, len(items), step):
        yield from pool.map(work, items[start : start + step])


def submit(work: Callable[[], R]) -> Future[R]:
    """Runs ``work`` in a thread, and returns a future with its result."""
    return _get_pool(os.getpid()).submit(work)


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator inside the ``with`` block and restores its state afterwards.

    CUDA's generators stay as they are. Build modules inside the block and move them to a device
    afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the CUDA generators too.
        seed_generator(torch.default_generator, seed)
        yield


def generator(seed: int) -> torch.Generator:
    """Returns a new CPU generator that is seeded with ``seed``."""
    random = torch.Generator()
    seed_generator(random, seed)
    return random


def seed_generator(random: torch.Generator, seed: int) -> None:
    """Seeds a CPU generator with a seed of ``derive_seed``.

    torch uses only 32 bits of a seed, so an attacker could try all seeds. A secret seed therefore
    fills the generator's whole state.
    """
    if seed < SECRET:
        random.manual_seed(seed)
        return
    _check_layout()
    _fill_state(random, _hash_seed(seed))


def _hash_seed(seed: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(seed.to_bytes(16, "little")).digest(4 * _WORDS), "<u4")


def _fill_state(random: torch.Generator, words: np.ndarray) -> None:
    # torch draws normal numbers in pairs and caches the second. Seeding clears this cache.
    random.manual_seed(0)
    state = random.get_state().numpy().copy()
    state[_FIRST : _FIRST + 8 * _WORDS].view("<u8")[:] = words
    random.set_state(torch.from_numpy(state))


@cache
def _check_layout() -> None:
    """Raises InternalError if torch's generator state has another layout than expected.

    The check compares torch's numbers with numpy's Mersenne Twister in the same state.
    """
    torch_generator, numpy_generator, words = (
        torch.Generator(),
        np.random.MT19937(),
        _hash_seed(SECRET),
    )
    _fill_state(torch_generator, words)
    numpy_generator.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
    numbers = torch.empty(2 * _WORDS, dtype=torch.int32).random_(generator=torch_generator)
    if not np.array_equal(numbers.numpy(), numpy_generator.random_raw(2 * _WORDS) & 0x7FFFFFFF):
        raise InternalError(
            'init = "secret" does not support the generator state of this version of torch; '
            'install the torch of pyproject.toml, or set init = "recipe"'
        )
