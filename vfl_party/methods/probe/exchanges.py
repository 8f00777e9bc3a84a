"""Declares the probe's exchange: latents of all rows, with digests of their ids, by which the
active party finds the labels.

The network is split in two: the party that holds a row has the bottom model, which computes the
latent, and the active party has the upper half, called the tail.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.models.halves import Tail
from vfl_party.models.row_blocks import in_blocks
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, Traffic, f32, u8
from vfl_party.phases.context import Party


def get_latent_shape(party: Party) -> tuple[int, ...]:
    """Returns the shape (C, H, W) of the latent, that is, of the bottom model's output for a
    row.
    """
    tail = party.models.get("tail")
    if isinstance(tail, Tail):
        return tail.latent
    bottom = party.models["encoder"]
    with torch.no_grad():
        z = bottom(torch.zeros(1, *party.rows.need_features().spec.shape, device=party.device))
    return tuple(z.shape[1:])


@torch.no_grad()
def compute_latents(party: Party, rows: Rows) -> Tensor:
    """Returns the latents of some of this party's rows, [B, C, H, W]."""
    bottom = party.models["encoder"]
    bottom.eval()
    return in_blocks(
        bottom, party.scores.blocks.get("encoder"), *party.rows.need_features().inputs(rows)
    )


def compute_features(party: Party, tail: Tail, z: Tensor) -> Tensor:
    """Computes the tail's features [B, E] of latents, in blocks; see
    ``vfl_party.models.row_blocks``.
    """
    return in_blocks(tail.features, party.scores.blocks.get("tail"), z)


DIGEST_BYTES = 16
_CHUNK_BYTES = 8 << 20
_MAX_ROWS = 1024
TRAINING = "local"

LATENTS = Exchange(
    "rows",
    Sent(
        Kind.EMBEDDING,
        {"z": f32("rows", "channels", "height", "width"), "ids": u8("rows", DIGEST_BYTES)},
    ),
    when="once",
)


def compute_digests(recipe: Recipe, ids: Sequence[str]) -> Tensor:
    """Returns a keyed digest of each id, uint8 [N, 16]. All parties have the key, so they can check
    a guessed id.
    """
    key = recipe.digest().encode()
    rows = [
        hmac.digest(key, identifier.encode(), hashlib.sha256)[:DIGEST_BYTES] for identifier in ids
    ]
    return torch.from_numpy(
        np.frombuffer(b"".join(rows), np.uint8).reshape(-1, DIGEST_BYTES).copy()
    )


def compute_message_rows(latent: Sequence[int]) -> int:
    """Returns the maximum number of rows in a message."""
    return int(max(1, min(_MAX_ROWS, _CHUNK_BYTES // (4 * int(np.prod(latent))))))


def divide_rows(rows: Rows, size: int) -> list[Rows]:
    """Divides rows into parts, each of which is sent in one message."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def count_parts(split: str, holdings: Mapping[str, Mapping[str, int]], size: int) -> int:
    """Returns the number of messages for a split: the number that the party with the most rows
    sends.
    """
    return max(-(-counts[split] // size) for counts in holdings.values())


def yield_steps(
    phase: str, splits: Sequence[str], holdings: Mapping[str, Mapping[str, int]], size: int
) -> Iterator[tuple[str, StepKey, int]]:
    """Yields the split, the step key and the message's number for each step.

    Steps are not listed in advance, because peers report how many rows they have, which may be a
    huge number.
    """
    batch = 0
    for split in splits:
        for part in range(count_parts(split, holdings, size)):
            yield split, StepKey(phase, 0, batch), part
            batch += 1


def list_senders(
    holdings: Mapping[str, Mapping[str, int]], split: str, part: int, size: int
) -> dict[str, int]:
    """Returns {sender: the number of its rows in message ``part`` of a split}."""
    remaining = {
        party: min(size, counts[split] - part * size) for party, counts in holdings.items()
    }
    return {party: count for party, count in remaining.items() if count > 0}


def check_bottom(recipe: Recipe, phase: str) -> None:
    """Raises InputError if a probe comes before the phase that sends the parties their bottom
    model.
    """
    if recipe.start is None or recipe.start.held_by != "active":
        return
    if "mocosfl" not in [
        earlier.kind
        for earlier in recipe.phases[: [other.name for other in recipe.phases].index(phase)]
    ]:
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: phases: {phase}: start.held_by = "active" sends the bottom model to the '
            'passive parties in a phase of kind "mocosfl", but no such phase comes before this '
            "one. Add one (it may be frozen).",
        )


def get_latent_sizes(latent: Sequence[int]) -> dict[str, int]:
    """Returns the sizes of ``LATENTS`` that are the same at every step, by the words in its
    shapes.
    """
    return dict(zip(("channels", "height", "width"), latent, strict=True))


def traffic(party: Party, name: str, settings: ProbeSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``. ``party`` must have features or
    the tail.
    """
    if not party.recipe.passives:
        return Traffic()
    latent = get_latent_shape(party)
    size, sizes, splits = (
        compute_message_rows(latent),
        get_latent_sizes(latent),
        (TRAINING, *settings.splits),
    )
    occurrences = [
        replace(Occurrence.of(LATENTS, step, rows=rows, **sizes), party=sender)
        for split, step, part in yield_steps(name, splits, party.rows.data.holdings, size)
        for sender, rows in list_senders(party.rows.data.holdings, split, part, size).items()
    ]
    return Traffic(occurrences)
