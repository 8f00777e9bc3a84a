"""All errors that a person or a peer can see.

    VflError ├── InputError the input cannot be used: file, recipe, certificate, address exit 2 │
    └── UnwritableError the disk is full, so that a file cannot be written exit 6 ├── PeerError a
    peer sent what the recipe does not allow, or refused us exit 2 ├── LostError a party did not
    come or answer before a deadline exit 3 ├── AbortedError another party stopped the run exit 4
    ├── InterruptedRun this generation of the run ended; rejoin and resume (caught internally) └──
    InternalError a defect of this program exit 1

A person sees ``str(error)``: what happened, where, and what to do. A peer sees only
``error.public``. An exception's text can hold paths, column names or values, so the public text is
the catalogue's sentence for the code, except for types whose texts say only what both sides know.
``CATALOGUE`` has an entry for every code, and ``failure.proto`` has the same names (both tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self


class Code(IntEnum):
    """The code of an error. Names and numbers are the same as in ``vfl.v1.FailureCode``."""

    INTERNAL = 1
    CONFIG_INVALID = 2
    FILE_INVALID = 3
    DATA_INVALID = 4
    ROWS_DIFFER = 5
    CERTIFICATE_INVALID = 6
    IDENTITY_MISMATCH = 7
    NOT_IN_RECIPE = 8
    NAME_TAKEN = 9
    ROLE_MISMATCH = 10
    RECIPE_DIFFERS = 11
    PROTOCOL_DIFFERS = 12
    ADDRESS_IN_USE = 13
    UNREACHABLE = 14
    TENSOR_MISMATCH = 15
    TENSOR_TOO_LARGE = 16
    NON_FINITE = 17
    STEP_OUT_OF_ORDER = 18
    STALE_GENERATION = 19
    MODEL_INVALID = 20
    DEVICE_MISSING = 21
    PARTY_LOST = 22
    STEP_TIMEOUT = 23
    ABORTED = 24
    INTERRUPTED = 25
    CHECKPOINT_INVALID = 26
    MALFORMED_MESSAGE = 27
    MODELS_DIFFER = 28
    REFUSED = 29
    PLUGINS_DIFFER = 30
    ADDRESS_INVALID = 31


@dataclass(frozen=True)
class Meaning:
    """The meaning of a code for a peer (``public``), a shell (``exit_code``) and a retry loop
    (``retryable``).

    ``own``: whether the error concerns only one party: its files, data or program.
    """

    public: str
    exit_code: int
    retryable: bool = False
    own: bool = False


CATALOGUE: dict[Code, Meaning] = {
    Code.INTERNAL: Meaning(
        "the party met an internal error; its own log has the details", 1, own=True
    ),
    Code.CONFIG_INVALID: Meaning(
        "the party's configuration cannot be used; its own log has the details", 2, own=True
    ),
    Code.FILE_INVALID: Meaning(
        "a file of the party cannot be used; its own log has the details", 2, own=True
    ),
    Code.DATA_INVALID: Meaning(
        "the party's data cannot be used; its own log has the details", 2, own=True
    ),
    Code.ROWS_DIFFER: Meaning("the parties do not hold the same rows", 2),
    Code.CERTIFICATE_INVALID: Meaning("a certificate cannot be used", 2),
    Code.IDENTITY_MISMATCH: Meaning(
        "the certificate names another party, or has another key than is pinned", 2
    ),
    Code.NOT_IN_RECIPE: Meaning("the party is not in the recipe", 2),
    Code.NAME_TAKEN: Meaning("a party of this name has already joined", 2),
    Code.ROLE_MISMATCH: Meaning("the party's role does not allow this call", 2),
    Code.RECIPE_DIFFERS: Meaning("the party's recipe differs from the server's", 2),
    Code.PROTOCOL_DIFFERS: Meaning("the party speaks another version of the protocol", 2),
    Code.ADDRESS_IN_USE: Meaning("a process cannot listen on its address", 2),
    Code.UNREACHABLE: Meaning("a peer does not answer", 2),
    Code.TENSOR_MISMATCH: Meaning(
        "a tensor's name, dtype or shape is not what the step expects", 2
    ),
    Code.TENSOR_TOO_LARGE: Meaning("a message is larger than its spec allows", 2),
    Code.NON_FINITE: Meaning("a tensor holds NaN or infinity", 2),
    Code.STEP_OUT_OF_ORDER: Meaning("a message arrived for a step that is not the current one", 2),
    Code.STALE_GENERATION: Meaning(
        "the message belongs to an earlier generation of the run", 2, retryable=True
    ),
    Code.MODEL_INVALID: Meaning("a model does not fit the recipe", 2, own=True),
    Code.DEVICE_MISSING: Meaning("a requested device does not exist", 2, own=True),
    Code.PARTY_LOST: Meaning("a party was lost and did not come back in time", 3),
    Code.STEP_TIMEOUT: Meaning("a party did not finish its step in time", 3),
    Code.ABORTED: Meaning("another party stopped the run", 4),
    Code.INTERRUPTED: Meaning(
        "the run was interrupted and resumes from a checkpoint", 4, retryable=True
    ),
    Code.CHECKPOINT_INVALID: Meaning("a checkpoint cannot be used", 2, own=True),
    Code.MALFORMED_MESSAGE: Meaning("a message cannot be read", 2),
    Code.MODELS_DIFFER: Meaning("the parties would aggregate different weights", 2),
    Code.REFUSED: Meaning(
        "the party's policy does not let something out that the recipe asks for", 2
    ),
    Code.PLUGINS_DIFFER: Meaning("the parties have different versions of a plug-in", 2),
    Code.ADDRESS_INVALID: Meaning("an address is not host:port, or cannot be resolved", 2),
}


class VflError(Exception):
    """The base class of all errors in this module.

    The type decides what a peer may read. The text of most types can hold paths, column names or
    values, so a peer reads the catalogue's sentence for the code. The text of a type with
    ``shared`` contains only facts that both sides know (names in the recipe, steps, shapes), so a
    peer reads that text.

    Args:
        code: The key of the error in the catalogue.
        message: The text for a person: what happened, where, and what to do.
        party: The party that the error is about, or ''.
    """

    shared: ClassVar[bool] = False

    def __init__(self, code: Code, message: str, *, party: str = "") -> None:
        super().__init__(message)
        self.code, self.party = code, party
        self._message = message

    @property
    def public(self) -> str:
        """The text for a peer."""
        return self._message if self.shared else CATALOGUE[self.code].public

    def privately(self, text: str) -> Self:
        """Sets another text for the person at this machine, and returns the error; the text for a
        peer stays the same.
        """
        self.args = (text,)
        return self

    @property
    def exit_code(self) -> int:
        """The exit code of a program that ends with this error."""
        return CATALOGUE[self.code].exit_code

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return CATALOGUE[self.code].retryable


class InputError(VflError):
    """The input of this process cannot be used."""


class ChangedError(InputError):
    """The rows or columns of this party differ from those with which its unfinished run began."""


class UnwritableError(InputError):
    """A file of this process cannot be written, because the disk is full. Peers learn the system's
    reason, but no path.

    The condition can pass: the other parties of a run wait for this process, as if it had been
    stopped.
    """

    shared = True
    EXIT_CODE: ClassVar[int] = 6

    @property
    def exit_code(self) -> int:
        return self.EXIT_CODE


class PeerError(VflError):
    """A peer sent what the recipe does not allow, or refused this process. Its text must hold
    nothing private.
    """

    shared = True


class LostError(VflError):
    """A party did not come, or did not answer, before a stated deadline. Its text must hold nothing
    private.
    """

    shared = True


class AbortedError(VflError):
    """Another party stopped the run."""

    def __init__(self, message: str, *, party: str = "") -> None:
        super().__init__(Code.ABORTED, message, party=party)


class InterruptedRun(VflError):  # noqa: N818 - an event of the run, not a fault
    """This generation of the run has ended: roll back, rejoin, resume. Its reason must hold nothing
    private.
    """

    shared = True

    def __init__(self, reason: str) -> None:
        super().__init__(Code.INTERRUPTED, reason)


class InternalError(VflError):
    """A defect of this program."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INTERNAL, message)


def is_stop(error: BaseException) -> bool:
    """Returns whether ``error`` means that the process was stopped by a signal or a full disk. The
    same command then resumes the run, and the other parties wait for it.
    """
    return isinstance(error, UnwritableError) or not isinstance(error, Exception)
