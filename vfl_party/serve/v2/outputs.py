"""Makes the outputs of an answer: the columns of a result, and who took part in each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vfl_common.rpc.inference.tensors import NUMBER, TEXT, TRUTH, WHOLE, Tensor
from vfl_party.serve.scored import ServedScores
from vfl_party.serve.tokens import Denied
from vfl_party.serve.v2.asked import IDS

# Extensions of the protocol: tensors as bytes.
EXTENSIONS = ["binary_tensor_data"]


def outputs_of(scores: ServedScores, parties: Sequence[str]) -> list[Tensor]:
    """Returns all outputs. ``parties``: all of them, in the recipe's order.

    ``state``, ``parties`` (names with commas between them) and ``run`` are text, ``present`` says
    of each party whether it took part, [N, parties], and ``expected_quality`` is a number. In the
    columns of a result, a row without a score has None, or no text.
    """
    n, has_score, numbers = len(scores), scores.has_score, scores.of_part.tolist()
    tensors = []
    for name, column in scores.columns.items():
        datatype = datatype_of(column.dtype)
        missing = "" if datatype == TEXT else None
        data = [
            value if has else missing for value, has in zip(column.tolist(), has_score, strict=True)
        ]
        tensors.append(Tensor(name, datatype, (n,), data))
    names, runs = (
        [",".join(part.parties) for part in scores.parts],
        [part.run for part in scores.parts],
    )
    there = [[name in part.parties for name in parties] for part in scores.parts]
    quality = [part.quality for part in scores.parts]
    return [
        *tensors,
        Tensor("state", TEXT, (n,), list(scores.state)),
        Tensor("parties", TEXT, (n,), [names[number] for number in numbers]),
        Tensor("run", TEXT, (n,), [runs[number] for number in numbers]),
        Tensor(
            "present",
            TRUTH,
            (n, len(parties)),
            [flag for number in numbers for flag in there[number]],
        ),
        Tensor("expected_quality", NUMBER, (n,), [quality[number] for number in numbers]),
    ]


def choose_outputs(outputs: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Returns the outputs that are wanted; all if there are no ``names``. Raises Denied."""
    known = {output.name: output for output in outputs}
    if any(name not in known for name in names):
        raise Denied(400, f"outputs: choose among {', '.join(known)}")
    return [known[name] for name in names] or list(outputs)


def describe_model(
    columns: Mapping[str, np.dtype[Any]], parties: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the inputs and outputs of a model without data; -1 is any size.

    The active party's columns are not listed: clients treat listed inputs as required.
    """
    outputs = [Tensor(name, datatype_of(dtype), (-1,), ()) for name, dtype in columns.items()]
    outputs += [
        Tensor("state", TEXT, (-1,), ()),
        Tensor("parties", TEXT, (-1,), ()),
        Tensor("run", TEXT, (-1,), ()),
        Tensor("present", TRUTH, (-1, len(parties)), ()),
        Tensor("expected_quality", NUMBER, (-1,), ()),
    ]
    return [Tensor(IDS, TEXT, (-1,), ())], outputs


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Returns the datatype of a column of a result."""
    if np.issubdtype(dtype, np.integer):
        return WHOLE
    return NUMBER if np.issubdtype(dtype, np.floating) else TEXT
