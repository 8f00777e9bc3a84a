"""What anybody on the network learns from the sizes of messages alone, although all contents are
encrypted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vfl.leak_meter.scene.record import Seen


@dataclass(frozen=True)
class MessageSizes:
    """The messages of one exchange in one direction.

    ``rounds``: how many there were. ``sizes``: {payload bytes of a message: how many}. ``tells``:
    what follows from them, in words.
    """

    phase: str
    exchange: str
    sender: str
    receiver: str
    rounds: int
    sizes: tuple[tuple[int, int], ...]
    tells: str


def told(seen: Iterable[Seen], row_bytes: int) -> list[MessageSizes]:
    """Returns a line for each exchange and direction.

    ``row_bytes``: of one row on the wire. It is known from the recipe, or the greatest common
    divisor of the sizes.
    """
    groups: dict[tuple[str, str, str, str], list[Seen]] = {}
    for each in seen:
        groups.setdefault((each.phase, each.exchange, each.sender, each.receiver), []).append(each)
    found = []
    for key, messages in groups.items():
        sizes = Counter(each.payload_bytes for each in messages)
        rounds = len({each.round for each in messages})
        rows = sum(each.payload_bytes for each in messages) // row_bytes
        each_round = (
            f"{rows // rounds:,} rows a round" if rows % rounds == 0 else f"{rows:,} rows in all"
        )
        most = max(sizes) // row_bytes
        tells = f"{each_round}, in batches of {most:,}; {rounds} round{'s' if rounds > 1 else ''}"
        found.append(MessageSizes(*key, rounds, tuple(sorted(sizes.items(), reverse=True)), tells))
    return found
