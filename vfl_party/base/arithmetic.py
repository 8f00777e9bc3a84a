"""Describes what decides the last bits of this process's numbers, for the checkpoints of a run.

Sums of floating-point numbers depend on their order, and libraries choose the order by instruction
set, number of threads and version. So the same program gives the same bits only with the same of
these (Intel, "Introduction to Conditional Numerical Reproducibility"; PyTorch,
"Reproducibility"). Names of versions do not show every choice: a digest of fixed operations shows
the bits themselves.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional, grad

from vfl_common.process.logs import version
from vfl_common.summary import Arithmetic, ArithmeticChange
from vfl_party.base.devices import device_name

# MKL, oneDNN, ATen, numpy and its OpenBLAS choose instruction sets by these.
SETTINGS = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "NPY_DISABLE_CPU_FEATURES",
    "OPENBLAS_CORETYPE",
)
# torch.__config__.show() has them.
_BUILT_WITH = {
    "MKL": r"Math Kernel Library Version (\S+?)(?:-Product|\s)",
    "oneDNN": r"MKL-DNN v(\S+)",
}
# Inner dimensions of the products: kernels divide long sums, each at another length.
_INNER = (8, 64, 256, 784, 1024, 2048)
# Rows of a product: kernels for one row, for few, and for many differ.
_ROWS = (1, 8, 40)
# Where the numbers of the second operand begin.
_OTHER = 99_991
# The fields that are compared, besides libraries, settings and digests.
_FACTS = ("device", "processor", "instructions", "threads")
# Hexadecimal digits of a digest.
_DIGITS = 16
# A limit, so that a party that changes machines often keeps within the bound of a report.
MAX_CHANGES = 100


def arithmetic(device: torch.device) -> Arithmetic:
    """Returns what decides the last bits of what this process computes on ``device``.

    The operations behind the digests run once per device and number of threads: 25 ms on a CPU. No
    generator of torch or numpy is touched.
    """
    return _arithmetic(device, torch.get_num_threads())


def compare_resumed(
    before: Arithmetic | None, now: Arithmetic, checkpoint: str
) -> tuple[Arithmetic, ArithmeticChange | None]:
    """Returns ``now`` with all changes of the run, and the change at this resume; None if nothing
    differs.

    Args:
        before: as the checkpoint has it; None: an earlier release wrote it.
        now: of this process.
        checkpoint: its label.
    """
    if before is None:
        return now, None
    differs = differences(before, now)
    change = ArithmeticChange(checkpoint=checkpoint, differs=differs) if differs else None
    changes = [*before.changes, *([change] if change is not None else [])][-MAX_CHANGES:]
    return now.model_copy(update={"changes": changes}), change


def differences(before: Arithmetic, now: Arithmetic) -> list[str]:
    """Returns in what two processes compute otherwise, a text for each difference, such as
    ``threads: 2, was 1``; [] if in nothing.
    """
    facts = [(name, getattr(now, name), getattr(before, name)) for name in _FACTS]
    for new, old in ((now.libraries, before.libraries), (now.settings, before.settings)):
        facts += [(name, new.get(name), old.get(name)) for name in dict.fromkeys([*new, *old])]
    texts = [
        f"{name}: {new or 'none'}, was {old or 'none'}" for name, new, old in facts if new != old
    ]
    bits = [name for name in now.digests if now.digests[name] != before.digests.get(name)]
    if bits:
        texts.append(f"other bits in {', '.join(bits)}")
    return texts


@cache
def _arithmetic(device: torch.device, threads: int) -> Arithmetic:
    backends: Any = torch.backends
    libraries = {"torch": torch.__version__, **_get_build_versions(), "numpy": np.__version__}
    if device.type == "cuda":
        libraries |= {"CUDA": str(torch.version.cuda), "cuDNN": str(backends.cudnn.version())}
    # bfloat16 on a CPU turns oneDNN off for a whole process when the first model runs, so that a
    # process that resumes would have other bits than the one that wrote the checkpoint.
    enabled, backends.mkldnn.enabled = backends.mkldnn.enabled, True
    try:
        digests = {name: _digest(results(device)) for name, results in _OPERATIONS.items()}
    finally:
        backends.mkldnn.enabled = enabled
    return Arithmetic(
        device="cpu" if device.type == "cpu" else device_name(device),
        processor=device_name(torch.device("cpu")),
        instructions=torch.backends.cpu.get_cpu_capability(),
        threads=threads,
        libraries=libraries | {"vfl": version()},
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
        digests=digests,
    )


def _get_build_versions() -> dict[str, str]:
    text = torch.__config__.show()
    matches = {name: re.search(pattern, text) for name, pattern in _BUILT_WITH.items()}
    return {name: match[1] for name, match in matches.items() if match}


def _digest(results: Iterator[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in results:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]


def _uniform(device: torch.device, *shape: int, first: int = 1) -> Tensor:
    """Returns numbers from -0.5 to 0.5, multiples of 2^-24, that follow from integers alone."""
    # Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3, section 6.4).
    hashed = np.arange(first, first + math.prod(shape), dtype=np.uint64) * 2654435769 % (1 << 32)
    numbers = (hashed // (1 << 8)) / (1 << 24) - 0.5
    return torch.from_numpy(numbers.astype(np.float32).reshape(shape)).to(device)


def _products(device: torch.device) -> Iterator[Tensor]:
    """Yields products of matrices, [M, K] x [K, 24], in float32; one in float64."""
    for inner in _INNER:
        x = _uniform(device, max(_ROWS), inner)
        weight = _uniform(device, inner, 24, first=_OTHER)
        for rows in _ROWS:
            yield x[:rows] @ weight
    yield x.double() @ weight.double()
    # Large enough to be divided between threads.
    yield _uniform(device, 256, 1024) @ _uniform(device, 1024, 257, first=_OTHER)


def _convolutions(device: torch.device) -> Iterator[Tensor]:
    """Yields a convolution of 8 images and of one, and its gradients."""
    x, weight = _uniform(device, 8, 3, 12, 12), _uniform(device, 8, 3, 3, 3, first=_OTHER)
    y = functional.conv2d(x, weight, padding=1)
    yield from (y, functional.conv2d(x[:1], weight, padding=1))
    yield grad.conv2d_input(x.shape, weight, y, padding=1)  # type: ignore[no-untyped-call]
    yield grad.conv2d_weight(x, weight.shape, y, padding=1)  # type: ignore[no-untyped-call]


def _functions(device: torch.device) -> Iterator[Tensor]:
    """Yields functions of elements, sums, normalisations; some by numpy, which prepares tables."""
    x = 8 * _uniform(device, 40, 33)
    for function in (
        torch.exp,
        torch.tanh,
        torch.sigmoid,
        functional.gelu,
        functional.silu,
        functional.softplus,
        torch.erf,
    ):
        yield function(x)
    for of_positive in (torch.log1p, torch.sqrt, torch.rsqrt):
        yield of_positive(x.abs() + 1)
    yield from (torch.softmax(x, 1), torch.log_softmax(x, 1), functional.layer_norm(x, [33]))
    yield functional.batch_norm(x, None, None, training=True)
    yield from (x.sum(), x.sum(0), x.var(0), x.norm())
    table = _uniform(torch.device("cpu"), 40, 33).numpy().astype(np.float64)
    for array in (np.exp(table), table.mean(0), table.std(0), table.sum()):
        yield torch.from_numpy(np.atleast_1d(array))


def _draws(device: torch.device) -> Iterator[Tensor]:
    """Yields draws of a generator that only this function has."""
    generator = torch.Generator(device).manual_seed(7)
    yield torch.randn(1000, generator=generator, device=device, dtype=torch.float32)
    yield torch.rand(1000, generator=generator, device=device, dtype=torch.float32)
    yield torch.randperm(1000, generator=generator, device=device)


_OPERATIONS: dict[str, Callable[[torch.device], Iterator[Tensor]]] = {
    "products": _products,
    "convolutions": _convolutions,
    "functions": _functions,
    "draws": _draws,
}
