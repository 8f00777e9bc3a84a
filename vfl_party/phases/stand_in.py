"""Makes stand-ins for the embeddings of a missing party: the mean of its training rows' embeddings,
or zeros.

The party computes the mean of its own embeddings and sends the mean once, as one row. The mean goes
through the same exchange as the evaluated rows, so it gets the same noise, defences and codec.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_party.base.devices import get_real_dtype
from vfl_party.base.seeds import Rows
from vfl_party.outbound.declared import Exchange, Occurrence
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk, split_into_chunks
from vfl_party.record.lines import TOGETHER

StandIn = Literal["mean", "zero"]
FILE = "stand-ins.safetensors"


@torch.no_grad()
def mean_embedding(party: Party, rows: Rows) -> Tensor:
    """Returns the mean of a party's own embeddings of ``rows`` in eval mode, float32 [1, D]. The
    embeddings are summed in float64.

    Raises InputError if there are no rows.
    """
    if not len(rows):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{party.name}: no training rows whose mean could stand in for a party. Set "
            'absent = "zero".',
        )
    features = party.rows.need_features()
    party.models["encoder"].eval()
    total_D = torch.zeros(party.exchanges.width, dtype=torch.float64, device=party.device)
    for chunk in features.expecting(split_into_chunks(rows)):
        total_D += party.encode(*features.inputs(chunk)).double().sum(dim=0)
    return (total_D / len(rows)).to(get_real_dtype())[None]


def count_steps(kind: StandIn) -> int:
    """Returns the number of steps that ``give`` and ``collect`` exchange."""
    return int(kind == "mean")


def give(side: Asking, party: Party, kind: StandIn, step: StepKey) -> None:
    """Sends a passive party's stand-in to the active party. Zeros are not sent. Raises as
    ``Asking.swap``.
    """
    if kind == "mean":
        side.swap(step, {"z": mean_embedding(party, party.rows.get("train"))}, TOGETHER)


def collect(side: Answering, party: Party, kind: StandIn, step: StepKey) -> dict[str, Tensor]:
    """Returns {party with features: its stand-in, [1, D]}, the active party first. Raises as
    ``Answering.collect``.
    """
    own: dict[str, Tensor] = {}
    if kind == "zero":
        if party.rows.features is not None:
            own[party.name] = torch.zeros(1, party.exchanges.width, device=party.device)
        return own | {
            name: torch.zeros(1, width, device=party.device)
            for name, width in party.exchanges.widths.items()
        }
    if party.rows.features is not None:
        own[party.name] = mean_embedding(party, party.rows.get("train"))
    received = side.collect(step, rows=1)
    side.acknowledge(step, received)
    return own | {name: tensors["z"] for name, tensors in received.items()}


def keep(folder: Path, embeddings: Mapping[str, Tensor]) -> None:
    """Writes the stand-ins that ``collect`` returned into the active party's run folder, for later
    scoring. Raises InputError.
    """
    data = safetensors.torch.save({name: z.detach().cpu() for name, z in embeddings.items()})
    with private_file(folder / FILE) as file:
        file.write(data)


def read_means(folder: Path) -> dict[str, Tensor]:
    """Returns the stand-ins that ``keep`` wrote; empty if there is no file. Raises InputError if
    the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        return safetensors.torch.load(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({type(error).__name__}). Restore the file, or train again.",
        ) from None


def traffic(party: Party, exchange: Exchange, kind: StandIn, step: StepKey) -> Iterable[Occurrence]:
    """Returns the exchanges of ``give`` and ``collect``, for a forecast."""
    return party.exchanges.list_occurrences(exchange, step, rows=1) if kind == "mean" else []


def replace_missing(
    embedded: Iterable[Chunk], active: str, there: Collection[str], stand_in: Mapping[str, Tensor]
) -> list[Chunk]:
    """Returns the chunks with stand-ins in place of the embeddings of all parties that are not in
    ``there``.

    Args:
        embedded: Chunks with all parties' embeddings.
        active: The name of the active party, whose embeddings are ``Chunk.own``.
        there: The names of the parties that keep their embeddings.
        stand_in: The stand-ins that ``collect`` returned.
    """

    def get_embeddings(name: str, z_BD: Tensor | None, rows: int) -> Tensor | None:
        return z_BD if name in there else stand_in[name].expand(rows, -1)

    return [
        Chunk(
            [z for own in chunk.own if (z := get_embeddings(active, own, chunk.rows)) is not None],
            {name: get_embeddings(name, z, chunk.rows) for name, z in chunk.others.items()},
            chunk.rows,
        )
        for chunk in embedded
    ]
