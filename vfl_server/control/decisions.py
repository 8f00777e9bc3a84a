"""What ``presence`` decides: each is done by ``conduct``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from vfl_common.errors import VflError


@dataclass(frozen=True)
class Close:
    """The session of ``party`` ends."""

    party: str


@dataclass(frozen=True)
class Tell:
    """People read that ``party`` is away or lost, and ``how``."""

    event: Literal["away", "lost"]
    party: str
    how: str


@dataclass(frozen=True)
class Interrupt:
    """The generation ends for all; ``leaving``: and their sessions with it."""

    reason: str
    lost: tuple[str, ...] = ()
    leaving: bool = False


@dataclass(frozen=True)
class Review:
    """Whether the run may begin is decided again, and those who wait hear for whom."""


@dataclass(frozen=True)
class Fail:
    """The run ends."""

    error: VflError


Action = Close | Tell | Interrupt | Review | Fail


class Admission(Enum):
    """How a party that joins is taken."""

    # As one that the run waits for.
    ENTERS = auto()
    # Into the generation under way, in which the others went on without it.
    RETURNS = auto()
    # The generation under way ends first: the party has left it before anybody noticed.
    INTERRUPTS = auto()
    # Not at all: it has done its part.
    DONE = auto()


class Claim(Enum):
    """The answer to a party that says that it went on without this server."""

    GOES_ON = auto()
    MAY_GO = auto()
    OVER = auto()
