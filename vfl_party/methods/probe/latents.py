"""The two sides of the exchange of latents: in the probe's training, and in a prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vfl_common.errors import Code, PeerError
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.cut import features_of, latent_of, latents_of
from vfl_party.methods.probe.exchanges import (
    LATENTS,
    digests,
    parts_in,
    rows_per_message,
    senders_of,
    sizes_of,
    steps,
)
from vfl_party.methods.probe.head import KnownRows
from vfl_party.models.halves import Tail
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class Collected:
    """The result of one step. ``parts``: {passive party: those of its rows that the active party
    knows}. ``unknown``: {passive party: the number of its other rows}.
    """

    split: str
    parts: Mapping[str, KnownRows]
    unknown: Mapping[str, int]


class Collector:
    """The active side: features of the rows that it knows, step by step. Open one per phase."""

    def __init__(self, party: Party, tail: Tail, phase: str) -> None:
        self._party, self._tail, self._phase = party, tail, phase
        self._size = rows_per_message(tail.latent)
        self._latents = party.answering(phase, LATENTS, **sizes_of(tail.latent))

    def count(self, splits: Sequence[str]) -> int:
        """Returns the number of steps for the rows of ``splits``."""
        return sum(parts_in(split, self._party.data.holdings, self._size) for split in splits)

    def collect(self, splits: Sequence[str]) -> Iterator[Collected]:
        """Yields the result of each step. Raises PeerError if a party sends one id for several
        rows.
        """
        party, holdings = self._party, self._party.data.holdings
        ids = party.data.ids
        number_of = {
            bytes(digest): row for row, digest in enumerate(digests(party.recipe, ids).numpy())
        }
        seen = {holder: np.zeros(len(ids), bool) for holder in holdings}
        for split, step, part in steps(self._phase, splits, holdings, self._size):
            senders = senders_of(holdings, split, part, self._size)
            received = self._latents.collect(
                step, each={sender: {"rows": rows} for sender, rows in senders.items()}
            )
            self._latents.acknowledge(step, received)
            parts, unknown = {}, {}
            for sender, tensors in received.items():
                rows = [number_of.get(bytes(digest), -1) for digest in tensors["ids"].cpu().numpy()]
                own = np.array([row for row in rows if row >= 0], np.int64)
                if len(np.unique(own)) < len(own) or seen[sender][own].any():
                    raise PeerError(
                        Code.MALFORMED_MESSAGE,
                        f"{sender}: sends one id for several rows at {step}.",
                        party=sender,
                    )
                seen[sender][own] = True
                z = tensors["z"][torch.tensor([row >= 0 for row in rows])]
                with torch.no_grad():
                    parts[sender] = KnownRows(own, features_of(party, self._tail, z))
                unknown[sender] = len(rows) - len(own)
            yield Collected(split, parts, unknown)


class Sender:
    """The passive side: latents of its rows, with digests of their ids. Open one per phase."""

    def __init__(self, party: Party, phase: str) -> None:
        self._party, self._phase = party, phase
        latent = latent_of(party)
        self._size = rows_per_message(latent)
        self._latents = party.asking(phase, LATENTS, **sizes_of(latent))

    def count(self, splits: Sequence[str]) -> int:
        """Returns the number of steps for the rows of ``splits`` of all parties."""
        return sum(parts_in(split, self._party.data.holdings, self._size) for split in splits)

    def send(self, splits: Mapping[str, Rows]) -> Iterator[None]:
        """Sends the rows of each split, and yields after each step."""
        party = self._party
        plan = steps(self._phase, [*splits], party.data.holdings, self._size)
        for split, step, part in plan:
            rows = splits[split][part * self._size : (part + 1) * self._size]
            if len(rows):
                z = latents_of(party, rows)
                ids = digests(party.recipe, [party.data.ids[row] for row in rows])
                self._latents.swap(step, {"z": z, "ids": ids}, rows)
            yield
