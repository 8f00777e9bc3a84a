"""Describes the hardware and software on which the exact bits of this process's results depend. A
run saves the description in its checkpoints.

Sums of floating-point numbers depend on their order, and libraries choose the order by instruction
set, number of threads and version. So the same program gives the same bits only if all of these are
the same (Intel, "Introduction to Conditional Numerical Reproducibility"; PyTorch,
"Reproducibility"). Version numbers do not show every choice, so the description also has digests of
the results of fixed operations.
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
from vfl_party.base.devices import get_device_name

# Environment variables by which MKL, oneDNN, ATen, NumPy and OpenBLAS choose instruction sets.
SETTINGS = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "NPY_DISABLE_CPU_FEATURES",
    "OPENBLAS_CORETYPE",
)
# Patterns of library versions in the text of torch.__config__.show().
_BUILT_WITH = {
    "MKL": r"Math Kernel Library Version (\S+?)(?:-Product|\s)",
    "oneDNN": r"MKL-DNN v(\S+)",
}
# The inner dimensions of the test products. Kernels split long sums at different lengths.
_INNER = (8, 64, 256, 784, 1024, 2048)
# The numbers of rows in the test products. Kernels for one, few and many rows differ.
_ROWS = (1, 8, 40)
# The first integer from which the second operand of each operation is generated.
_OTHER = 99_991
# The fields of ``Arithmetic`` to compare besides libraries, settings and digests.
_FACTS = ("device", "processor", "instructions", "threads")
# The number of hexadecimal digits of a digest.
_DIGITS = 16
# The maximum number of changes in a report, whose size is limited.
MAX_CHANGES = 100


def describe_arithmetic(device: torch.device) -> Arithmetic:
    """Describes the arithmetic of this process on ``device``: hardware, libraries and digests.

    The operations behind the digests run once per device and number of threads (25 ms on a CPU).
    The random generators of torch and NumPy are not used.
    """
    return _arithmetic(device, torch.get_num_threads())


def compare_resumed(
    before: Arithmetic | None, now: Arithmetic, checkpoint: str
) -> tuple[Arithmetic, ArithmeticChange | None]:
    """Compares the arithmetic of a resumed run. Returns ``now`` with all changes of the run, and
    the change at this resume; None if nothing differs.

    Args:
        before: The arithmetic in the checkpoint; None if an earlier release wrote it.
        now: The arithmetic of this process.
        checkpoint: The label of the checkpoint.
    """
    if before is None:
        return now, None
    differences = list_differences(before, now)
    change = ArithmeticChange(checkpoint=checkpoint, differs=differences) if differences else None
    changes = [*before.changes, *([change] if change is not None else [])][-MAX_CHANGES:]
    return now.model_copy(update={"changes": changes}), change


def list_differences(before: Arithmetic, now: Arithmetic) -> list[str]:
    """Returns the differences between two processes, such as ``threads: 2, was 1``, as one text for
    each.
    """
    facts = [(name, getattr(now, name), getattr(before, name)) for name in _FACTS]
    for new, old in ((now.libraries, before.libraries), (now.settings, before.settings)):
        facts += [(name, new.get(name), old.get(name)) for name in dict.fromkeys([*new, *old])]
    texts = [
        f"{name}: {new or 'none'}, was {old or 'none'}" for name, new, old in facts if new != old
    ]
    changed_digests = [
        name for name in now.digests if now.digests[name] != before.digests.get(name)
    ]
    if changed_digests:
        texts.append(f"other bits in {', '.join(changed_digests)}")
    return texts


@cache
def _arithmetic(device: torch.device, threads: int) -> Arithmetic:
    backends: Any = torch.backends
    libraries = {"torch": torch.__version__, **_get_build_versions(), "numpy": np.__version__}
    if device.type == "cuda":
        libraries |= {"CUDA": str(torch.version.cuda), "cuDNN": str(backends.cudnn.version())}
    # The first model in bfloat16 on a CPU turns oneDNN off for the whole process. oneDNN is turned
    # on here, so that digests before and after the first model are comparable.
    enabled, backends.mkldnn.enabled = backends.mkldnn.enabled, True
    try:
        digests = {name: _hash_results(results(device)) for name, results in _OPERATIONS.items()}
    finally:
        backends.mkldnn.enabled = enabled
    return Arithmetic(
        device="cpu" if device.type == "cpu" else get_device_name(device),
        processor=get_device_name(torch.device("cpu")),
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


def _hash_results(results: Iterator[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in results:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]


def _make_numbers(device: torch.device, *shape: int, start: int = 1) -> Tensor:
    """Returns fixed numbers from -0.5 to 0.5, float32 [shape], which are the same everywhere."""
    # Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3, section 6.4).
    hashes = np.arange(start, start + math.prod(shape), dtype=np.uint64) * 2654435769 % (1 << 32)
    numbers = (hashes // (1 << 8)) / (1 << 24) - 0.5
    return torch.from_numpy(numbers.astype(np.float32).reshape(shape)).to(device)


def _compute_products(device: torch.device) -> Iterator[Tensor]:
    """Yields matrix products, [M, K] x [K, 24], in float32 and float64."""
    for inner in _INNER:
        x = _make_numbers(device, max(_ROWS), inner)
        weight = _make_numbers(device, inner, 24, start=_OTHER)
        for rows in _ROWS:
            yield x[:rows] @ weight
    yield x.double() @ weight.double()
    # This product is large enough to be divided between threads.
    yield _make_numbers(device, 256, 1024) @ _make_numbers(device, 1024, 257, start=_OTHER)


def _compute_convolutions(device: torch.device) -> Iterator[Tensor]:
    """Yields a convolution of 8 images, a convolution of one image, and the gradients."""
    x, weight = _make_numbers(device, 8, 3, 12, 12), _make_numbers(device, 8, 3, 3, 3, start=_OTHER)
    y = functional.conv2d(x, weight, padding=1)
    yield from (y, functional.conv2d(x[:1], weight, padding=1))
    yield grad.conv2d_input(x.shape, weight, y, padding=1)  # type: ignore[no-untyped-call]
    yield grad.conv2d_weight(x, weight.shape, y, padding=1)  # type: ignore[no-untyped-call]


def _compute_functions(device: torch.device) -> Iterator[Tensor]:
    """Yields element-wise functions, sums and normalisations, by torch and by NumPy."""
    x = 8 * _make_numbers(device, 40, 33)
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
    table = _make_numbers(torch.device("cpu"), 40, 33).numpy().astype(np.float64)
    for array in (np.exp(table), table.mean(0), table.std(0), table.sum()):
        yield torch.from_numpy(np.atleast_1d(array))


def _draw_numbers(device: torch.device) -> Iterator[Tensor]:
    """Yields random numbers from a separate generator."""
    generator = torch.Generator(device).manual_seed(7)
    yield torch.randn(1000, generator=generator, device=device, dtype=torch.float32)
    yield torch.rand(1000, generator=generator, device=device, dtype=torch.float32)
    yield torch.randperm(1000, generator=generator, device=device)


_OPERATIONS: dict[str, Callable[[torch.device], Iterator[Tensor]]] = {
    "products": _compute_products,
    "convolutions": _compute_convolutions,
    "functions": _compute_functions,
    "draws": _draw_numbers,
}
