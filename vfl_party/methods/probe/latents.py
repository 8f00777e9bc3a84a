"""The two sides of the exchange of latents, for the probe's training and for a prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vfl_common.errors import Code, PeerError
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.cut import compute_features, compute_latents, get_latent_shape
from vfl_party.methods.probe.exchanges import (
    LATENTS,
    compute_digests,
    compute_message_rows,
    count_parts,
    get_latent_sizes,
    list_senders,
    yield_steps,
)
from vfl_party.methods.probe.head import KnownRows
from vfl_party.models.halves import Tail
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class CollectedStep:
    """The rows that arrived in one step.

    ``parts``: {passive party: those of its rows that the active party knows}. ``unknown``: {passive
    party: the number of its rows that the active party does not know}.
    """

    split: str
    parts: Mapping[str, KnownRows]
    unknown: Mapping[str, int]


class LatentCollector:
    """The active party's side: computes features of the rows that it knows, step by step. Make one
    per phase.
    """

    def __init__(self, party: Party, tail: Tail, phase: str) -> None:
        self._party, self._tail, self._phase = party, tail, phase
        self._size = compute_message_rows(tail.latent)
        self._latents = party.answering(phase, LATENTS, **get_latent_sizes(tail.latent))

    def count(self, splits: Sequence[str]) -> int:
        """Returns the number of steps for the rows of ``splits``."""
        return sum(count_parts(split, self._party.data.holdings, self._size) for split in splits)

    def collect(self, splits: Sequence[str]) -> Iterator[CollectedStep]:
        """Yields the rows of each step. Raises PeerError if a party sends one id for several
        rows.
        """
        party, holdings = self._party, self._party.data.holdings
        ids = party.data.ids
        row_by_digest = {
            bytes(digest): row
            for row, digest in enumerate(compute_digests(party.recipe, ids).numpy())
        }
        seen = {holder: np.zeros(len(ids), bool) for holder in holdings}
        for split, step, part in yield_steps(self._phase, splits, holdings, self._size):
            senders = list_senders(holdings, split, part, self._size)
            received = self._latents.collect(
                step, each={sender: {"rows": rows} for sender, rows in senders.items()}
            )
            self._latents.acknowledge(step, received)
            parts, unknown = {}, {}
            for sender, tensors in received.items():
                rows = [
                    row_by_digest.get(bytes(digest), -1) for digest in tensors["ids"].cpu().numpy()
                ]
                known_rows = np.array([row for row in rows if row >= 0], np.int64)
                if len(np.unique(known_rows)) < len(known_rows) or seen[sender][known_rows].any():
                    raise PeerError(
                        Code.MALFORMED_MESSAGE,
                        f"{sender}: sends one id for several rows at {step}.",
                        party=sender,
                    )
                seen[sender][known_rows] = True
                z = tensors["z"][torch.tensor([row >= 0 for row in rows])]
                with torch.no_grad():
                    parts[sender] = KnownRows(known_rows, compute_features(party, self._tail, z))
                unknown[sender] = len(rows) - len(known_rows)
            yield CollectedStep(split, parts, unknown)


class LatentSender:
    """A passive party's side: sends latents of its rows, with digests of their ids. Make one per
    phase.
    """

    def __init__(self, party: Party, phase: str) -> None:
        self._party, self._phase = party, phase
        latent = get_latent_shape(party)
        self._size = compute_message_rows(latent)
        self._latents = party.asking(phase, LATENTS, **get_latent_sizes(latent))

    def count(self, splits: Sequence[str]) -> int:
        """Returns the number of steps for all parties' rows of ``splits``."""
        return sum(count_parts(split, self._party.data.holdings, self._size) for split in splits)

    def send(self, splits: Mapping[str, Rows]) -> Iterator[None]:
        """Sends the rows of each split, and yields after each step."""
        party = self._party
        plan = yield_steps(self._phase, [*splits], party.data.holdings, self._size)
        for split, step, part in plan:
            rows = splits[split][part * self._size : (part + 1) * self._size]
            if len(rows):
                z = compute_latents(party, rows)
                ids = compute_digests(party.recipe, [party.data.ids[row] for row in rows])
                self._latents.swap(step, {"z": z, "ids": ids}, rows)
            yield
