"""Measures what an observer of the network learns from the sizes of encrypted messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vfl_leaks.scene.record import Seen


@dataclass(frozen=True)
class MessageSizes:
    """The sizes of the messages of one exchange in one direction.

    ``rounds``: the number of rounds. ``sizes``: (payload bytes, number of messages) pairs.
    ``tells``: a text that says what the sizes reveal.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    rounds: int
    sizes: tuple[tuple[int, int], ...]
    tells: str


def read_sizes(seen: Iterable[Seen], row_bytes: int) -> list[MessageSizes]:
    """Returns the sizes and what they reveal, for each exchange and direction.

    ``row_bytes``: the bytes of one row on the wire. An observer knows them from the recipe, or as
    the greatest common divisor of the sizes.
    """
    groups: dict[tuple[str, str, str, str], list[Seen]] = {}
    for message in seen:
        groups.setdefault(
            (message.phase, message.exchange, message.sender, message.receiver), []
        ).append(message)
    lines = []
    for key, messages in groups.items():
        sizes = Counter(message.payload_bytes for message in messages)
        rounds = len({message.round for message in messages})
        rows = sum(message.payload_bytes for message in messages) // row_bytes
        each_round = (
            f"{rows // rounds:,} rows per round"
            if rows % rounds == 0
            else f"{rows:,} rows in total"
        )
        largest = max(sizes) // row_bytes
        tells = (
            f"{each_round}, in batches of {largest:,}; {rounds} round{'s' if rounds > 1 else ''}"
        )
        lines.append(MessageSizes(*key, rounds, tuple(sorted(sizes.items(), reverse=True)), tells))
    return lines
