"""Assertions about errors: their code and the names in their text, and not how they are worded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from vfl_common.errors import Code, VflError

E = TypeVar("E", bound=BaseException)


@contextmanager
def raises(
    kind: type[E] | tuple[type[E], ...],
    *codes: Code,
    names: str | tuple[str, ...] = (),
    party: str | None = None,
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expects an error in the block, whose text is one line if it is an error of ours.

    Args:
        kind: type of the error, or a base class of it.
        codes: code of the error. Several where the cases of a test differ.
        names: what the text must contain: a field, an option, a party, a number.
        party: the party that the error is about. Default: not checked.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    if isinstance(error, VflError):
        assert error.code in codes, f"expected {codes!r} (got {error.code!r}): {error}"
        assert "\n" not in str(error), f"more than one line: {error}"
        assert party is None or error.party == party, (
            f"expected {party} (got {error.party}): {error}"
        )
    else:
        assert not codes, f"{error!r} has no code"
    assert_names(str(error), *((names,) if isinstance(names, str) else names))


def assert_names(text: str, *names: str) -> None:
    """Asserts that a text is not blank and contains all ``names``."""
    assert text.strip()
    missing = [name for name in names if name not in text]
    assert not missing, f"{missing} not in: {text}"


def error_line(stderr: str, *names: str) -> str:
    """Returns the only line in which a program that has ended says why it failed.

    Args:
        stderr: everything that the program wrote to its standard error.
        names: what the line must contain.
    """
    (line,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert_names(line, *names)
    return line
