"""What a table has that computes its cells itself, in place of a study."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers.data import Sources
from benchmarks.papers.describe import Column, Data, Scale, Tables
from benchmarks.papers.plan import Variant
from vfl_common.files import write_atomic


@dataclass(frozen=True)
class Work:
    """``seeds``: to be run. ``folder``: for the table's own files."""

    scale: Scale
    seeds: Sequence[int]
    folder: Path
    sources: Sources
    say: Callable[[str], None]

    def base(self, data: Data, column: Column) -> Tables:
        """Returns parties, rows and simulate of a data set. Raises VflError if it is not there."""
        return self.sources.base(Variant(data, (column,), 1), self.scale)

    def once(self, key: str, value: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Returns named numbers, from an earlier call with the same key if there was one."""
        path = self.folder / "values.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        if key not in kept:
            self.say(key)
            kept[key] = value()
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(kept, indent=1) + "\n")
        found: dict[str, float] = kept[key]
        return found
