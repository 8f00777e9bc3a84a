"""The decisions that ``presence`` makes and ``conduct`` carries out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from vfl_common.errors import VflError


@dataclass(frozen=True)
class Close:
    """Decision to end the session of ``party``."""

    party: str


@dataclass(frozen=True)
class Tell:
    """Decision to emit an event: ``party`` is away or lost. ``how``: How it was lost."""

    event: Literal["away", "lost"]
    party: str
    how: str


@dataclass(frozen=True)
class Interrupt:
    """Decision to end the generation for all parties. ``leaving``: Whether their sessions end
    too.
    """

    reason: str
    lost: tuple[str, ...] = ()
    leaving: bool = False


@dataclass(frozen=True)
class Review:
    """Decision to check again whether the run may begin, and to report to the waiting parties whom
    the run waits for.
    """


@dataclass(frozen=True)
class Fail:
    """Decision to end the run with ``error``."""

    error: VflError


Action = Close | Tell | Interrupt | Review | Fail


class Admission(Enum):
    """How the server handles a party that joins."""

    # The party enters the run, which waits for parties.
    ENTERS = auto()
    # The party returns to the current generation, which continued without it.
    RETURNS = auto()
    # The current generation ends first, because the party left it without being noticed.
    INTERRUPTS = auto()
    # The party is refused, because it has finished its part of the run.
    DONE = auto()


class Claim(Enum):
    """The answer to a party that reports that it continued without this server."""

    GOES_ON = auto()
    MAY_GO = auto()
    OVER = auto()
