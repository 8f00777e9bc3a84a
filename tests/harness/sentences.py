"""The sentences that people read, in one file: ``tests/sentences.txt``.

A test says which error comes, and with which code; how the error words it stands in that file,
under the test's name. So a change of wording changes one file, and a person reads the difference.
``make sentences`` writes the file again.

``…`` in the file stands for any text: what differs between versions of Python and of libraries.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from pydantic import ValidationError

from vfl_common.errors import Code, VflError

FILE = Path(__file__).parents[1] / "sentences.txt"
RENEW = "VFL_TESTS_RENEW_SENTENCES"

E = TypeVar("E", bound=BaseException)

_REPO = str(Path(__file__).parents[2])
# What differs from run to run.
_VARIABLE = [
    (re.compile(re.escape(_REPO)), "<repo>"),
    (
        re.compile(r"(/[\w.-]+)+/pytest-of-[\w-]+/pytest-\d+(/popen-gw\d+)?/[^/\s'\",:;)]+"),
        "<tmp>",
    ),
    (re.compile(r"/tmp/tmp\w{6,}"), "<tmp>"),  # noqa: S108
    (re.compile(r"https://errors\.pydantic\.dev/\S+"), "<pydantic>"),
    (re.compile(r"/tmp/(vfl|pg)-\w+"), "<tmp>"),  # noqa: S108
    (re.compile(r"&port=\d+"), "&port=<port>"),
    (re.compile(r"--port \d+"), "--port <port>"),
    (re.compile(r"/dev/shm/[\w.-]+"), "<tmp>"),  # noqa: S108
    (re.compile(r"(127\.0\.0\.1|localhost|\[::1\]|0\.0\.0\.0):\d{4,5}"), r"\1:<port>"),
    (re.compile(r"\b\d{8}-\d{6}-[\w.-]*?-[0-9a-f]{4}\b"), "<run>"),
    # A digest may have digits alone; elsewhere these are a number.
    (
        re.compile(
            r"(?:(?<=broken-)|(?<=not-shown-)|(?<=grant )|(?<=it has )|(?<=/))\d{12}(?=\.json|,| |$)"
        ),
        "<hex>",
    ),
    (re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b"), "<hex>"),
    (re.compile(r"\bpid \d+|\bprocess \d{3,}"), "<process>"),
    (re.compile(r"0x[0-9a-f]{8,}"), "<address>"),
    (re.compile(r", line \d+"), ", line <n>"),
    (re.compile(r"(\w\.py):\d+"), r"\1:<n>"),
    # Tests that want a time of their own take one before this project.
    (re.compile(r"\b20(2[6-9]|[3-9]\d)-\d\d-\d\d \d\d:\d\d UTC"), "<time>"),
]

_counts: defaultdict[str, int] = defaultdict(int)
_renewed: dict[str, list[str]] = {}


@contextmanager
def raises(
    kind: type[E] | tuple[type[E], ...], *codes: Code, worded: bool = True
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expects an error of ``kind`` in the block, worded as ``sentences.txt`` has it.

    Args:
        kind: the error's type, or one that it is derived from.
        codes: its code. Several where the cases of a test differ; the file has each one's.
        worded: compare the sentence. False where it differs from run to run.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    code = ""
    if isinstance(error, VflError):
        assert error.code in codes, f"{error.code!r}, and {codes!r} was expected: {error}"
        code = f"{error.code.name}: "
    else:
        assert not codes, f"{error!r} has no code"
    if worded:
        # Our sentences alone, without how pydantic lists them.
        said = (
            "; ".join(each["msg"] for each in error.errors())
            if isinstance(error, ValidationError)
            else str(error)
        )
        worded_as_before(f"{code}{said}")


def worded_as_before(text: str) -> None:
    """Compares ``text`` with what ``sentences.txt`` has for this call in the running test."""
    name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    text = plain(text)
    place = _counts[name]
    _counts[name] += 1
    texts = known().get(name, [])
    before = texts[place] if place < len(texts) else None
    same = before is not None and _matches(before, text)
    if os.environ.get(RENEW):
        _renewed.setdefault(name, []).append(before if same and before is not None else text)
        return
    assert before is not None, (
        f"tests/sentences.txt has no such sentence; make sentences adds it: {text}"
    )
    assert same, (
        f"worded otherwise (make sentences renews it)\n  before: {before}\n  now:    {text}"
    )


def error_as_before(stderr: str) -> str:
    """Compares the one line in which a program says why it failed, and returns the line.

    Args:
        stderr: all that the program, which has ended, wrote to its standard error.
    """
    (line,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    worded_as_before(line)
    return line


def plain(text: str) -> str:
    """Returns ``text`` on one line, without what differs from run to run.

    A sign that cannot be printed becomes its number.
    """
    for pattern, word in _VARIABLE:
        text = pattern.sub(word, text)
    return "".join(
        each if each.isprintable() else f"<{ord(each):x}>" for each in text.replace("\n", "\\n")
    )


def begin(name: str) -> None:
    """Begins a test: its sentences are counted from the first."""
    _counts.pop(name, None)
    _renewed.pop(name, None)


def write_part(folder: Path, worker: str) -> None:
    """Writes what this process has renewed, to be merged by ``merge``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{worker}.json").write_text(json.dumps(_renewed))


def merge(folder: Path) -> None:
    """Writes ``sentences.txt`` with what all processes have renewed, without tests that are gone."""
    found = {name: texts for name, texts in known().items() if _is_there(name)}
    for part in sorted(folder.glob("*.json")):
        found |= json.loads(part.read_text())
        part.unlink()
    folder.rmdir()
    lines: list[str] = []
    for name in sorted(found):
        lines += [name.replace("\n", "\\n"), *(f"    {text}" for text in found[name])]
    FILE.write_text("\n".join([*lines, ""]))


def _is_there(name: str) -> bool:
    file, _, function = name.partition("[")[0].partition("::")
    path = FILE.parents[1] / file
    return path.exists() and f"def {function}(" in path.read_text()


def _matches(before: str, text: str) -> bool:
    if before == text:
        return True
    return (
        "…" in before
        and re.fullmatch(".*".join(map(re.escape, before.split("…"))), text) is not None
    )


_read: dict[str, list[str]] | None = None


def known() -> dict[str, list[str]]:
    """Returns {a test's name: its sentences in order}, as ``sentences.txt`` has them."""
    global _read
    if _read is None:
        _read = {}
        name = ""
        for line in FILE.read_text().split("\n")[:-1] if FILE.exists() else []:
            if line.startswith("    "):
                _read[name].append(line[4:])
            else:
                name = line
                _read[name] = []
    return _read
