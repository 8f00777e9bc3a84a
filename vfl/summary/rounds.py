"""Reads rounds from ``metrics.jsonl``, for exports and learning curves. The file may still be
written meanwhile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.files import GrowingFile, part_names
from vfl_common.text import number

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class RoundLine:
    """One finished round: a line of ``metrics.jsonl``.

    Args:
        generation: The generation of the run, which a rollback increases.
        phase: The name of the phase.
        round: The number of the round in the phase.
        rounds: The planned number of rounds of the phase; 0 if unknown.
        steps: The number of steps since the run began.
        time_s: The Unix time of the end of the round.
        metrics: {split: {metric: value}}.
        values: All numbers of the round by a path such as ``splitnn/validation/auc``, including
            bytes and seconds.
    """

    generation: int
    phase: str
    round: int
    rounds: int
    steps: int
    time_s: float
    metrics: dict[str, dict[str, float]]
    values: dict[str, float]


@dataclass(frozen=True)
class PartyFolder:
    """The folder of one party in the folder of a run."""

    folder: Path

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.folder.resolve().parent.name

    @property
    def party(self) -> str:
        """The name of the party."""
        return self.folder.resolve().name

    @property
    def has_rounds(self) -> bool:
        """Whether the folder has a file of rounds."""
        return any(part.is_file() for part in part_names(self.folder / FILE))

    @property
    def finished(self) -> bool:
        """Whether the party has finished the run."""
        return bool(self.read("run.json").get("finished"))

    def read(self, name: str) -> dict[str, Any]:
        """Reads a JSON object from a file in the folder; empty if it is missing or damaged."""
        try:
            content = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def find_sources(path: Path) -> list[PartyFolder]:
    """Finds the parties with rounds in the folder of a run, or in the folder of one party.

    Raises InputError if no party has rounds.
    """
    folders = (
        [path]
        if PartyFolder(path).has_rounds
        else sorted(folder for folder in path.glob("*") if PartyFolder(folder).has_rounds)
    )
    if not folders:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: contains no {FILE}, nor does a party's folder in it. Give the folder "
            "OUT/RUN-ID of a run that has completed its first round."
            if path.is_dir()
            else f"{path}: no such folder. Give the folder OUT/RUN-ID of a run.",
        )
    return [PartyFolder(folder) for folder in folders]


@dataclass
class History:
    """The rounds of a party, each once. After a rollback, a repeated round replaces the earlier
    one.
    """

    source: PartyFolder
    rounds: list[RoundLine] = field(default_factory=list)
    _file: GrowingFile = field(init=False)

    def __post_init__(self) -> None:
        self._file = GrowingFile(self.source.folder / FILE)

    def update(self) -> list[RoundLine]:
        """Reads and returns the complete lines since the last call, including rotated files.

        Raises InputError if a file cannot be read.
        """
        new_lines = list[RoundLine]()
        try:
            for data, written_s in self._file.new():
                for line in data.splitlines():
                    parsed = parse_round(line, written_s)
                    if parsed is not None:
                        self._append(parsed)
                        new_lines.append(parsed)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self._file.path}: cannot be read ({error.strerror}). Check its permissions.",
            ) from None
        return new_lines

    def _append(self, new: RoundLine) -> None:
        if self.rounds and new.generation != self.rounds[-1].generation:
            for index, earlier in enumerate(self.rounds):
                if earlier.phase == new.phase and earlier.round >= new.round:
                    del self.rounds[index:]
                    break
        self.rounds.append(new)


def parse_round(line: bytes, written_s: float) -> RoundLine | None:
    """Parses a line of ``metrics.jsonl``. Returns None if the line is damaged or incomplete.

    Args:
        line: The line, JSON in UTF-8.
        written_s: The Unix time to use if the line has no time, in seconds.
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
