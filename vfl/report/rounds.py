"""Reads ``metrics.jsonl`` as rounds, for exports and learning curves; also while the file grows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.files import Growing, part_names
from vfl_common.text import number

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class RoundLine:
    """One line. ``metrics``: {split: {name: value}}; ``values``: {``splitnn/validation/auc``:
    0.97}, bytes and seconds among them; ``time_s``: Unix time.
    """

    generation: int
    phase: str
    round: int
    # Planned; 0 if the line does not say it.
    rounds: int
    # Since the run began.
    steps: int
    time_s: float
    metrics: dict[str, dict[str, float]]
    values: dict[str, float]


@dataclass(frozen=True)
class Source:
    """One party's folder of one run."""

    folder: Path

    @property
    def run_id(self) -> str:
        return self.folder.resolve().parent.name

    @property
    def party(self) -> str:
        return self.folder.resolve().name

    @property
    def has_rounds(self) -> bool:
        """Whether there is a file of rounds."""
        return any(part.is_file() for part in part_names(self.folder / FILE))

    @property
    def finished(self) -> bool:
        """Whether the party's program has finished the run."""
        return bool(self.read("run.json").get("finished"))

    def read(self, name: str) -> dict[str, Any]:
        """Reads a JSON file of the folder; empty if there is none."""
        try:
            found = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def find_sources(path: Path) -> list[Source]:
    """Finds the parties in a run's folder, or the one party whose folder it is. Raises InputError
    if there are none.
    """
    folders = (
        [path]
        if Source(path).has_rounds
        else sorted(each for each in path.glob("*") if Source(each).has_rounds)
    )
    if not folders:
        what = (
            f"no {FILE} in it or in a party's folder below" if path.is_dir() else "no such folder"
        )
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: {what}; give a run's folder, OUT/RUN-ID, after its first round is done",
        )
    return [Source(folder) for folder in folders]


@dataclass
class History:
    """The party's rounds, each once: after a rollback the repeated round replaces the first."""

    source: Source
    rounds: list[RoundLine] = field(default_factory=list)
    _file: Growing = field(init=False)

    def __post_init__(self) -> None:
        self._file = Growing(self.source.folder / FILE)

    def update(self) -> list[RoundLine]:
        """Reads the new complete lines, of older files too, and returns them. Raises InputError if
        a file cannot be read.
        """
        new = list[RoundLine]()
        try:
            for data, written_s in self._file.new():
                for line in data.splitlines():
                    found = parse(line, written_s)
                    if found is not None:
                        self._append(found)
                        new.append(found)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID, f"{self._file.path}: cannot be read ({error.strerror})"
            ) from None
        return new

    def _append(self, new: RoundLine) -> None:
        if self.rounds and new.generation != self.rounds[-1].generation:
            for place, each in enumerate(self.rounds):
                if each.phase == new.phase and each.round >= new.round:
                    del self.rounds[place:]
                    break
        self.rounds.append(new)


def parse(line: bytes, written_s: float) -> RoundLine | None:
    """Parses one line; returns None if it is cut off, as after a kill, or damaged.

    ``written_s``: the time if the line has none.
    """
    try:
        entry = json.loads(line)
        phase = str(entry["phase"])
        metrics = {
            str(split): {str(name): number(value) for name, value in named.items()}
            for split, named in entry["metrics"].items()
        }
        values = {
            f"{phase}/{split}/{name}": value
            for split, named in metrics.items()
            for name, value in named.items()
        }
        values["bytes/sent"], values["bytes/received"] = (
            float(entry["sent_bytes"]),
            float(entry["received_bytes"]),
        )
        values["seconds"] = float(entry["seconds"])
        time_s = datetime.fromisoformat(entry["time"]).timestamp() if "time" in entry else written_s
        return RoundLine(
            int(entry["generation"]),
            phase,
            int(entry["round"]),
            int(entry.get("rounds", 0)),
            int(entry["steps"]),
            time_s,
            metrics,
            values,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
