"""Stores the tags of an alignment on the server's disk, first as the parties send them, then in
parts that fit into memory.

A part contains the tags of all parties that begin with the same bits, so equal tags are in the same
part. Tags are masked points, which are spread evenly, so the parts have similar sizes. An earlier
process may have stored some batches of the same attempt. Then the parties send only the other
batches.
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
from vfl_common.psi import TAG_BYTES, count_tag_batches
from vfl_common.psi.spill import Spill

# A tag has twelve bytes. Two numbers are sorted faster than twelve bytes.
TAG = np.dtype([("high", "<u8"), ("low", "<u4")])
_PLACED = np.dtype([("tag", TAG), ("row", "<u8")])
# The number of tags in one part, and the maximum number of parts: a part is chosen by a tag's first
# byte.
_PART_TAGS, _MAX_PARTS = 1 << 20, 256
_STATE = "state.json"
# One part of the tags: {party: (its tags, the rows of these tags)}.
Part = Mapping[str, tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]]


class KeptTags:
    """Stores the parties' tags as files in a folder.

    Args:
        folder: The folder for the files, which need not exist.
        word: The identifier of the alignment attempt, which all parties share.
        sizes: {party: its number of rows}.

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
        if self._read_state() != facts:
            self.remove()
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise write_error(folder, error) from None
            with private_file(folder / _STATE) as file:
                file.write(json.dumps(facts).encode())

    def _read_state(self) -> object:
        try:
            return json.loads((self._folder / _STATE).read_text())
        except (OSError, ValueError, RecursionError):
            return None

    def find_first_batch(self) -> int:
        """Returns the number of the first batch that some party has to send. The last batch is
        always sent, because its answer contains the common rows.
        """
        batches = [count_tag_batches(self._sizes.values()) - 1]
        for party, spill in self._spills.items():
            if (stored := spill.count_rows()) < self._sizes[party]:
                batches.append(stored // psi.TAG_BATCH)
        return min(batches)

    def add(self, number: int, party: str, tags: memoryview) -> None:
        """Stores a batch of a party's tags. Raises InputError if the disk is full."""
        if tags:
            self._spills[party].write(number, tags)

    def parts(self) -> Iterator[Part]:
        """Yields all tags, part by part. Raises InputError if the disk is full, or a file is
        damaged.
        """
        total = sum(self._sizes.values())
        bits = min(-(-total // _PART_TAGS) - 1, _MAX_PARTS - 1).bit_length()
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                parts = [_PartFile(Path(place) / str(part)) for part in range(1 << bits)]
                for party in self._sizes:
                    for tags in self._read_placed(party):
                        _distribute(party, tags, parts, bits)
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
        """Removes all stored tags."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class _PartFile:
    """The file with the tags of one part, party by party. ``counts``: {party: the number of its
    tags}.
    """

    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    checksum: int = 0

    def add(self, party: str, tags: npt.NDArray[np.void]) -> None:
        data = tags.tobytes()
        # The temporary folder has mode 0700, so the file needs no mode.
        with self.path.open("ab", buffering=0) as file:
            unwritten = memoryview(data)
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        self.counts[party] = self.counts.get(party, 0) + len(tags)
        self.checksum = zlib.crc32(data, self.checksum)

    def read(self, parties: Mapping[str, int], remedy: str) -> Part:
        """Returns the tags that were added, and removes the file. Raises InputError if the file is
        damaged.
        """
        data = self.path.read_bytes() if self.counts else b""
        if zlib.crc32(data) != self.checksum:
            raise InputError(Code.FILE_INVALID, f"{self.path}: the file is damaged. {remedy}")
        self.path.unlink(missing_ok=True)
        counts = [self.counts.get(party, 0) for party in parties]
        arrays = np.split(np.frombuffer(data, _PLACED), np.cumsum(counts)[:-1])
        return {
            party: (array["tag"], array["row"].astype(np.int64))
            for party, array in zip(parties, arrays, strict=True)
        }


def _distribute(party: str, tags: npt.NDArray[np.void], parts: list[_PartFile], bits: int) -> None:
    """Adds each tag to the part whose number is the tag's first ``bits`` bits."""
    first_bytes = tags["tag"].copy().view(np.uint8).reshape(-1, TAG_BYTES)[:, 0]
    part_number = first_bytes >> (8 - bits) if bits else np.zeros(len(tags), np.uint8)
    order = np.argsort(part_number, kind="stable")
    ends = np.searchsorted(part_number[order], np.arange(len(parts) + 1))
    for part, start, end in zip(parts, ends[:-1], ends[1:], strict=True):
        if end > start:
            part.add(party, tags[order[start:end]])
