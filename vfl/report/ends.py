"""Finds how a run without a summary has ended, from the logs of its processes on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.report.rounds import PartyFolder
from vfl_common.text import LINE, clean

# Events that a process logs last.
_ENDS = ("failed", "stopped")
# Number of bytes at the end of a log that contain its last line.
_TAIL = 65_536
# The code of a process that another one has stopped.
_OTHERS = "ABORTED"
_ERROR = "error: "


@dataclass(frozen=True)
class End:
    """The end of a run.

    ``state``: ``set aside``, ``failed``, ``stopped``, or ``unfinished`` (it is running, or was
    killed). ``why``: a sentence; '' if unknown. ``resumes``: whether the same commands resume it,
    unlike a simulation or a prediction.
    """

    state: str
    why: str = ""
    resumes: bool = True

    @property
    def sentence(self) -> str:
        """The end as a sentence."""
        if self.state == "unfinished":
            return "the run has not ended. If it was interrupted, resume it with the same commands."
        if self.state == "set aside":
            return f"the run was set aside and is never resumed ({self.why})"
        if self.state == "stopped":
            remedy = ". Resume it with the same commands." if self.resumes else ""
            return f"the run was stopped{remedy}"
        remedy = ". Fix the cause, and resume it with the same commands." if self.resumes else ""
        return f"the run has failed{f' ({self.why})' if self.why else ''}{remedy}"


def end_of(processes: Sequence[PartyFolder]) -> End:
    """Returns how an unfinished run has ended, by the logs and the standard error of its
    processes.
    """
    aside = [source.read("run.json").get("set_aside") for source in processes]
    if whys := [str(noted.get("why", "")) for noted in aside if isinstance(noted, dict)]:
        return End("set aside", clean(whys[0], LINE), resumes=False)
    lines = [_last(source.folder / "log.jsonl") for source in processes]
    paths = {path for source in processes for path in source.folder.parent.glob("*/stderr")}
    last_lines = [
        line
        for line in (_last_line(path).decode("utf-8", "replace") for path in sorted(paths))
        if line
    ]
    errors = [line.removeprefix(_ERROR) for line in last_lines if line.startswith(_ERROR)]
    events = {str(line.get("event", "")) for line in lines} | ({"failed"} if errors else set())
    state = next((event for event in _ENDS if event in events), "unfinished")
    failed = [line for line in lines if line.get("event") == "failed"]
    # A process that stopped because of another one knows less about the cause.
    failed.sort(key=lambda line: line.get("code") == _OTHERS)
    why = next(
        (str(line["message"]) for line in failed if line.get("message")),
        errors[0] if errors else "",
    )
    alone = any((source.folder.parent / "federation").is_dir() for source in processes)
    resumes = not alone and all(
        source.read("run.json").get("job") != "predict" for source in processes
    )
    return End(state, clean(why, LINE), resumes)


def _last(log: Path) -> dict[str, Any]:
    """Returns the last whole line of a log; empty without one."""
    try:
        record = json.loads(_last_line(log))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _last_line(path: Path) -> bytes:
    """Returns the last line of a file that is not empty; b'' without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return b""
