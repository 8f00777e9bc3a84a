"""Computes the uniform mean of the parties' weights. numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Buffer, Bundle, DType, Kind, StepKey
from vfl_common.errors import Code, PeerError

_WIRE = np.dtype("<f4")


def mean(bundles: Mapping[str, Bundle], step: StepKey) -> Bundle:
    """Returns the sum of all bundles in the order of the roster, in float32, divided by their number.

    ``bundles``: {party: its weights}; at least one, all with the same float32 tensors. They are not changed.

    Raises PeerError (NON_FINITE) if a party sent NaN or infinity, or the sum is beyond float32.
    """
    like = next(iter(bundles.values())).tensors
    return Bundle(Kind.WEIGHTS, {name: _mean(name, buffer.shape, bundles, step) for name, buffer in like.items()})


def _mean(name: str, shape: tuple[int, ...], bundles: Mapping[str, Bundle], step: StepKey) -> Buffer:
    total: npt.NDArray[np.float32] | None = None
    for party, bundle in bundles.items():
        values = np.frombuffer(bundle.tensors[name].data, dtype=_WIRE)
        if not np.isfinite(values).all():
            raise _not_finite(f"tensor {name[:40]!r} of {party} at {step} holds NaN or infinity", party)
        if total is None:
            total = values.copy()
            continue
        with np.errstate(over="ignore"):
            total += values
    assert total is not None  # noqa: S101 - at least one party
    if not np.isfinite(total).all():
        raise _not_finite(f"the sum of tensor {name[:40]!r} of all parties at {step} is beyond float32", "")
    total /= np.float32(len(bundles))
    return Buffer(DType.FLOAT32, shape, total.data.cast("B") if total.nbytes else memoryview(b""))


def _not_finite(message: str, party: str) -> PeerError:
    return PeerError(Code.NON_FINITE, message, party=party)
