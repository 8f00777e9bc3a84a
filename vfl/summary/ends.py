"""Determines how a run without a summary ended, from its processes' logs on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.summary.rounds import PartyFolder
from vfl_common.text import LINE, clean

# The events that can be the last line of a process's log.
_ENDS = ("failed", "stopped")
# The number of bytes to read at the end of a log to find its last line.
_TAIL = 65_536
# The error code of a process that stopped because another process failed.
_ABORTED = "ABORTED"
_ERROR = "error: "


@dataclass(frozen=True)
class End:
    """The end of a run.

    Args:
        state: ``set aside``, ``failed``, ``stopped``, or ``unfinished`` (the run is still running,
            or was killed).
        why: A sentence with the reason; empty if it is unknown.
        resumes: Whether the same commands resume the run. False for a simulation or a prediction.
    """

    state: str
    why: str = ""
    resumes: bool = True

    @property
    def sentence(self) -> str:
        """A sentence that says how the run ended."""
        if self.state == "unfinished":
            return "the run has not ended. If it was interrupted, resume it with the same commands."
        if self.state == "set aside":
            return f"the run was set aside and is never resumed ({self.why})"
        if self.state == "stopped":
            remedy = ". Resume it with the same commands." if self.resumes else ""
            return f"the run was stopped{remedy}"
        remedy = ". Fix the cause, and resume it with the same commands." if self.resumes else ""
        return f"the run has failed{f' ({self.why})' if self.why else ''}{remedy}"


def find_end(processes: Sequence[PartyFolder]) -> End:
    """Returns how a run without a summary ended, from the logs and standard error of its
    processes.
    """
    notes = [source.read("run.json").get("set_aside") for source in processes]
    if reasons := [str(note.get("why", "")) for note in notes if isinstance(note, dict)]:
        return End("set aside", clean(reasons[0], LINE), resumes=False)
    lines = [_read_last_record(source.folder / "log.jsonl") for source in processes]
    paths = {path for source in processes for path in source.folder.parent.glob("*/stderr")}
    last_lines = [
        line
        for line in (_read_last_line(path).decode("utf-8", "replace") for path in sorted(paths))
        if line
    ]
    errors = [line.removeprefix(_ERROR) for line in last_lines if line.startswith(_ERROR)]
    events = {str(line.get("event", "")) for line in lines} | ({"failed"} if errors else set())
    state = next((event for event in _ENDS if event in events), "unfinished")
    failed = [line for line in lines if line.get("event") == "failed"]
    # A process that was aborted because another process failed does not know the cause.
    failed.sort(key=lambda line: line.get("code") == _ABORTED)
    why = next(
        (str(line["message"]) for line in failed if line.get("message")),
        errors[0] if errors else "",
    )
    simulated = any((source.folder.parent / "federation").is_dir() for source in processes)
    resumes = not simulated and all(
        source.read("run.json").get("job") != "predict" for source in processes
    )
    return End(state, clean(why, LINE), resumes)


def _read_last_record(log: Path) -> dict[str, Any]:
    """Returns the last line of a log as JSON; an empty dict if the line is missing or damaged."""
    try:
        record = json.loads(_read_last_line(log))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _read_last_line(path: Path) -> bytes:
    """Returns the last non-empty line of a file; b'' if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return b""
