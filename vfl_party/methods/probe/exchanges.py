"""The exchange of the probe: latents of all rows, with digests of their ids, with which the active
party finds their labels.
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
from vfl_party.methods.probe.cut import latent_of
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, Traffic, f32, u8
from vfl_party.phases.context import Party

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


def digests(recipe: Recipe, ids: Sequence[str]) -> Tensor:
    """Returns a keyed digest of each id, uint8 [N, 16]. The parties share the key, and can check a
    guessed id.
    """
    key = recipe.digest().encode()
    rows = [
        hmac.digest(key, identifier.encode(), hashlib.sha256)[:DIGEST_BYTES] for identifier in ids
    ]
    return torch.from_numpy(
        np.frombuffer(b"".join(rows), np.uint8).reshape(-1, DIGEST_BYTES).copy()
    )


def rows_per_message(latent: Sequence[int]) -> int:
    """Returns the number of rows in a message."""
    return int(max(1, min(_MAX_ROWS, _CHUNK_BYTES // (4 * int(np.prod(latent))))))


def parts_of(rows: Rows, size: int) -> list[Rows]:
    """Divides rows into the parts that are sent in one message."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def parts_in(split: str, holdings: Mapping[str, Mapping[str, int]], size: int) -> int:
    """Returns the number of parts of a split, which is that of the party with the most rows."""
    return max(-(-held[split] // size) for held in holdings.values())


def steps(
    phase: str, splits: Sequence[str], holdings: Mapping[str, Mapping[str, int]], size: int
) -> Iterator[tuple[str, StepKey, int]]:
    """Yields, for each step: the split, the key, and the number of the part.

    It is an iterator, because peers decide how many rows they have.
    """
    batch = 0
    for split in splits:
        for part in range(parts_in(split, holdings, size)):
            yield split, StepKey(phase, 0, batch), part
            batch += 1


def senders_of(
    holdings: Mapping[str, Mapping[str, int]], split: str, part: int, size: int
) -> dict[str, int]:
    """Returns {sender: its number of rows in a part}."""
    left = {party: min(size, held[split] - part * size) for party, held in holdings.items()}
    return {party: count for party, count in left.items() if count > 0}


def check_bottom(recipe: Recipe, phase: str) -> None:
    """Raises InputError if a probe comes before the phase that gives the parties their bottom
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
            'others in a phase of kind "mocosfl", but there is none before this phase. Put one '
            "there (it may be frozen).",
        )


def sizes_of(latent: Sequence[int]) -> dict[str, int]:
    """Returns the sizes in the shapes of ``LATENTS`` that are the same at every step."""
    return dict(zip(("channels", "height", "width"), latent, strict=True))


def traffic(party: Party, name: str, settings: ProbeSettings) -> Traffic:
    """See ``Method.traffic``. The party is one that has features or the tail."""
    if not party.recipe.passives:
        return Traffic()
    latent = latent_of(party)
    size, sizes, splits = rows_per_message(latent), sizes_of(latent), (TRAINING, *settings.splits)
    occurrences = [
        replace(Occurrence.of(LATENTS, step, rows=rows, **sizes), party=sender)
        for split, step, part in steps(name, splits, party.data.holdings, size)
        for sender, rows in senders_of(party.data.holdings, split, part, size).items()
    ]
    return Traffic(occurrences)
