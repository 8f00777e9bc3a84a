"""Computes the uniform mean of the parties' weights. numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import HUGE, ITEM_BYTES, Buffer, Bundle, DType, Kind, StepKey
from vfl_common.errors import Code, PeerError

Numbers = npt.NDArray[np.floating]
# A party is an outlier if the norm of its weights is this many times the largest other norm.
_OUTLIER_RATIO = 1000.0


def mean(bundles: Mapping[str, Bundle], step: StepKey) -> Bundle:
    """Returns the mean of all bundles, summed in roster order in float32.

    ``bundles``: {party: its weights}. At least one bundle; all have float32 tensors of the same
    names and shapes. They are not changed.

    Raises PeerError (NON_FINITE) if a party sent NaN, infinity, or numbers too large to train with.
    In the mean they would look like an error of the parties that receive it.
    """
    tensors = next(iter(bundles.values())).tensors
    return Bundle(
        Kind.WEIGHTS,
        {name: _mean(name, buffer.shape, bundles, step) for name, buffer in tensors.items()},
    )


def _mean(
    name: str, shape: tuple[int, ...], bundles: Mapping[str, Bundle], step: StepKey
) -> Buffer:
    total: Numbers | None = None
    for party, bundle in bundles.items():
        values = _view_as_array(bundle.tensors[name])
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


def find_outlier(bundles: Mapping[str, Bundle]) -> str:
    """Returns the party whose weights have a norm over 1,000 times the largest norm of any other
    party; '' if there is none.
    """
    norms = {party: _norm(bundle) for party, bundle in bundles.items()}
    (party, largest_norm), *smaller_norms = sorted(norms.items(), key=lambda pair: -pair[1])
    return (
        party if smaller_norms and largest_norm > _OUTLIER_RATIO * smaller_norms[0][1] > 0.0 else ""
    )


def _norm(bundle: Bundle) -> float:
    arrays = map(_view_as_array, bundle.tensors.values())
    return float(
        np.sqrt(sum(np.einsum("i,i->", values, values, dtype=np.float64) for values in arrays))
    )


def _view_as_array(buffer: Buffer) -> Numbers:
    return np.frombuffer(buffer.data, f"<f{ITEM_BYTES[DType.FLOAT32]}")
