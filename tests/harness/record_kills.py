"""Kills a program that writes into a record, at many moments: ``python -m
tests.harness.record_kills FOLDER [COUNT]``.

The writer says over a pipe what has left, after the record has it. What it said before it was
killed must be in the record, no line may be torn, and the tree must go on from its head of before.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from vfl_party.record import tree
from vfl_party.record.book import LINES, RecordBook

# Longer than a page of memory, between two of which the kernel may end a write.
_LONG = 3 * 4096


def write(folder: Path, said: int, seed: int) -> None:
    """Writes lines until it is killed, and says after each that its bundle has left."""
    book, number = RecordBook(folder, "p1"), 0
    chance = random.Random(seed)  # noqa: S311 - of a test
    while True:
        number += 1
        book.add(seed=seed, number=number, filler="x" * chance.randrange(_LONG))
        os.write(said, number.to_bytes(4, "little"))
        if chance.random() < 0.1:
            book.head()


def kill(folder: Path, seed: int) -> tuple[int, bool]:
    """Kills one writer; returns how many bundles had left, and whether a line was torn."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        write(folder, writes, seed)
    os.close(writes)
    # It has begun when it has said something.
    first = os.read(reads, 4)
    time.sleep(random.Random(seed).uniform(0.0, 0.02))  # noqa: S311 - of a test
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = first
    while more := os.read(reads, 1 << 16):
        said += more
    os.close(reads)
    data = (folder / LINES).read_bytes()
    return len(said) // 4, not data.endswith(b"\n")


def main(folder: Path, count: int) -> None:
    """Kills ``count`` writers of one record, one after the other; raises AssertionError."""
    folder.mkdir(parents=True, exist_ok=True)
    before, torn = RecordBook(folder, "p1"), 0
    head = before.head()
    before.close()
    for seed in range(count):
        left, was_torn = kill(folder, seed)
        torn += was_torn
        book = RecordBook(folder, "p1")
        now = book.head()
        proof = book.consistency(head.size, now.size)
        book.close()
        assert tree.is_consistent(head.size, now.size, head.root, now.root, proof), seed
        lines = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
        numbers = [line["number"] for line in lines if line.get("seed") == seed]
        assert numbers == [*range(1, len(numbers) + 1)], seed
        assert len(numbers) >= left, (seed, left, len(numbers))
        assert len(lines) == now.size, seed
        head = now
    print(json.dumps({"kills": count, "torn": torn, "lines": head.size}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
