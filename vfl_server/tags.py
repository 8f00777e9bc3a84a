"""The tags of an alignment, on the disk of the server: as the parties send them, then in parts that
fit into memory.

A part holds the tags of all parties that begin alike, so equal tags are in the same part. Tags are
masked points, which are spread evenly: how they begin tells no more than they do. An earlier
process may have kept some batches of the same attempt; then the parties send the others.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common import psi
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_error
from vfl_common.psi import TAG_BYTES, tag_batches
from vfl_common.psi.spill import Spill

# Two numbers are sorted faster than twelve bytes.
TAG = np.dtype([("high", "<u8"), ("low", "<u4")])
_PLACED = np.dtype([("tag", TAG), ("row", "<u8")])
# Tags of all parties that are compared at once; more if that makes more parts than there are first
# bytes.
_AT_ONCE, _MAX_PARTS = 1 << 20, 256
_STATE = "state.json"
# One part of the tags: {party: (its tags, their rows)}.
Part = Mapping[str, tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]]


class KeptTags:
    """The files, in ``folder``.

    Args:
        folder: of the server's folder of the run; it need not exist.
        word: what the parties call the attempt.
        sizes: {party: its rows}.

    Raises InputError if the folder cannot be written.
    """

    def __init__(self, folder: Path, word: bytes, sizes: Mapping[str, int]) -> None:
        self._folder, self._sizes = folder, sizes
        remedy = f"Remove {folder}, and start the server again; the parties send their tags again."
        self._remedy = remedy
        self._spills = {
            party: Spill(folder / f"{number}.tags", TAG_BYTES, psi.TAG_BATCH, remedy)
            for number, party in enumerate(sizes)
        }
        facts = {"attempt": word.hex(), "sizes": list(sizes.values())}
        if self._facts() != facts:
            self.remove()
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise write_error(folder, error) from None
            with private_file(folder / _STATE) as file:
                file.write(json.dumps(facts).encode())

    def _facts(self) -> object:
        try:
            return json.loads((self._folder / _STATE).read_text())
        except (OSError, ValueError, RecursionError):
            return None

    def first(self) -> int:
        """Returns the first batch that somebody has to send: the last one always, because its
        answer says which rows are common.
        """
        batches = [tag_batches(self._sizes.values()) - 1]
        for party, spill in self._spills.items():
            if (stored := spill.count_rows()) < self._sizes[party]:
                batches.append(stored // psi.TAG_BATCH)
        return min(batches)

    def add(self, number: int, party: str, tags: memoryview) -> None:
        """Keeps a batch of a party's tags. Raises InputError."""
        if tags:
            self._spills[party].write(number, tags)

    def parts(self) -> Iterator[Part]:
        """Yields all tags, part by part. Raises InputError if the disk is full, or a file is
        damaged.
        """
        total = sum(self._sizes.values())
        bits = min(-(-total // _AT_ONCE) - 1, _MAX_PARTS - 1).bit_length()
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                parts = [_PartFile(Path(place) / str(part)) for part in range(1 << bits)]
                for party in self._sizes:
                    for tags in self._read_placed(party):
                        _deal(party, tags, parts, bits)
                for part in parts:
                    yield part.read(self._sizes, self._remedy)
        except OSError as error:
            raise write_error(self._folder, error) from None

    def _read_placed(self, party: str) -> Iterator[npt.NDArray[np.void]]:
        """Yields a party's tags with their rows, batch by batch."""
        size = self._sizes[party]
        for number, start in enumerate(range(0, size, psi.TAG_BATCH)):
            tags = np.frombuffer(self._spills[party].read(number, size), TAG)
            placed = np.empty(len(tags), _PLACED)
            placed["tag"], placed["row"] = tags, np.arange(start, start + len(tags))
            yield placed

    def remove(self) -> None:
        """Removes all."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class _PartFile:
    """The tags of one part, party by party. ``counts``: {party: how many there are}."""

    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def add(self, party: str, tags: npt.NDArray[np.void]) -> None:
        data = tags.tobytes()
        # Its folder is its owner's alone.
        with self.path.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        self.counts[party] = self.counts.get(party, 0) + len(tags)
        self.total = zlib.crc32(data, self.total)

    def read(self, parties: Mapping[str, int], remedy: str) -> Part:
        """Returns what was added, and removes the file."""
        data = self.path.read_bytes() if self.counts else b""
        if zlib.crc32(data) != self.total:
            raise InputError(Code.FILE_INVALID, f"{self.path}: is damaged. {remedy}")
        self.path.unlink(missing_ok=True)
        counts = [self.counts.get(party, 0) for party in parties]
        arrays = np.split(np.frombuffer(data, _PLACED), np.cumsum(counts)[:-1])
        return {
            party: (array["tag"], array["row"].astype(np.int64))
            for party, array in zip(parties, arrays, strict=True)
        }


def _deal(party: str, tags: npt.NDArray[np.void], parts: list[_PartFile], bits: int) -> None:
    """Adds tags to the parts that their first ``bits`` bits say."""
    first_bytes = tags["tag"].copy().view(np.uint8).reshape(-1, TAG_BYTES)[:, 0]
    number = first_bytes >> (8 - bits) if bits else np.zeros(len(tags), np.uint8)
    order = np.argsort(number, kind="stable")
    ends = np.searchsorted(number[order], np.arange(len(parts) + 1))
    for part, first, end in zip(parts, ends[:-1], ends[1:], strict=True):
        if end > first:
            part.add(party, tags[order[first:end]])
