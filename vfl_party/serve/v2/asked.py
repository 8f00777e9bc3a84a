"""Reads the inputs of a request: ids, and columns of the active party."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vfl_common.rpc.inference.tensors import TEXT, Tensor, TensorError, values
from vfl_party.data.ids import SEPARATOR
from vfl_party.serve.tokens import Denied

IDS = "ids"


def ids_of(inputs: Sequence[Tensor]) -> list[str]:
    """Returns the ids of a request, the input ``ids``: BYTES, [N] or [N, columns of an id]. Raises
    Denied.
    """
    names = [tensor.name for tensor in inputs]
    if names.count(IDS) != 1 or len(set(names)) != len(names):
        raise Denied(400, "inputs: must have the input ids, and each input once")
    tensor = inputs[names.index(IDS)]
    if tensor.datatype != TEXT:
        raise Denied(400, "inputs: ids: datatype must be BYTES")
    cells = _values(tensor)
    if not all(isinstance(cell, str) for cell in cells):
        raise Denied(400, "inputs: ids: data must be text")
    rows, *columns = tensor.shape or [0]
    per = columns[0] if columns else 1
    if per < 1:
        raise Denied(400, "inputs: ids: shape must be [N], or [N, columns of an id]")
    return [SEPARATOR.join(cells[at * per : (at + 1) * per]) for at in range(rows)]


def columns_of(inputs: Sequence[Tensor], n: int) -> dict[str, list[Any]] | None:
    """Returns the active party's columns of ``n`` rows: all inputs but ``ids``, [N] or [N, 1].
    None if there are none. Raises Denied.
    """
    columns = {}
    for tensor in inputs:
        if tensor.name == IDS:
            continue
        if tuple(tensor.shape) not in ((n,), (n, 1)):
            raise Denied(400, f"inputs: {tensor.name}: shape must be [{n}], one value for each id")
        columns[tensor.name] = _values(tensor)
    return columns or None


def min_quality_of(parameters: Mapping[str, Any]) -> float | None:
    """Returns the least quality that is asked for; None: any. Raises Denied."""
    value = parameters.get("min_quality")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Denied(400, "parameters: min_quality must be a finite number")
    return value


def _values(tensor: Tensor) -> list[Any]:
    try:
        return values(tensor)
    except TensorError as error:
        raise Denied(400, f"inputs: {error}") from None
