"""Computes the uniform mean of the parties' weights. numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import HUGE, ITEM_BYTES, Buffer, Bundle, DType, Kind, StepKey
from vfl_common.errors import Code, PeerError

Numbers = npt.NDArray[np.floating]
# A party whose weights have a norm this many times that of all others is an outlier.
_TIMES = 1000.0


def mean(bundles: Mapping[str, Bundle], step: StepKey) -> Bundle:
    """Returns the sum of all bundles in the order of the roster, in float32, divided by their
    number.

    ``bundles``: {party: its weights}; at least one, all with the same float32 tensors. They are not
    changed.

    Raises PeerError (NON_FINITE) if a party sent NaN, infinity, or numbers too large to train with:
    in the mean they look like the fault of the parties that train on with it.
    """
    like = next(iter(bundles.values())).tensors
    return Bundle(
        Kind.WEIGHTS,
        {name: _mean(name, buffer.shape, bundles, step) for name, buffer in like.items()},
    )


def _mean(
    name: str, shape: tuple[int, ...], bundles: Mapping[str, Bundle], step: StepKey
) -> Buffer:
    total: Numbers | None = None
    for party, bundle in bundles.items():
        values = _numbers(bundle.tensors[name])
        minimum, maximum = values.min(initial=0.0), values.max(initial=0.0)
        if not (minimum >= -HUGE and maximum <= HUGE):
            finite = np.isfinite(minimum) and np.isfinite(maximum)
            raise PeerError(
                Code.NON_FINITE,
                f"tensor {name[:40]!r} of {party} at {step} holds numbers beyond {HUGE:g}, too "
                "large to train with"
                if finite
                else f"tensor {name[:40]!r} of {party} at {step} holds NaN or infinity",
                party=party,
            )
        if total is None:
            total = values.copy()
            continue
        total += values
    assert total is not None  # noqa: S101 - at least one party
    total /= total.dtype.type(len(bundles))
    return Buffer(DType.FLOAT32, shape, total.data.cast("B") if total.nbytes else memoryview(b""))


def outlier(bundles: Mapping[str, Bundle]) -> str:
    """Returns the party whose weights have a norm a thousand times that of all others; '' if none
    has.
    """
    norms = {party: _norm(bundle) for party, bundle in bundles.items()}
    (party, first), *others = sorted(norms.items(), key=lambda pair: -pair[1])
    return party if others and first > _TIMES * others[0][1] > 0.0 else ""


def _norm(bundle: Bundle) -> float:
    arrays = map(_numbers, bundle.tensors.values())
    return float(
        np.sqrt(sum(np.einsum("i,i->", values, values, dtype=np.float64) for values in arrays))
    )


def _numbers(of: Buffer) -> Numbers:
    return np.frombuffer(of.data, f"<f{ITEM_BYTES[DType.FLOAT32]}")
