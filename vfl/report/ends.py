"""How a run without a summary has ended, as far as its processes on this machine have said."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.report.rounds import Source
from vfl_common.text import LINE, clean

# Events that a process logs last.
_ENDS = ("failed", "stopped")
# Bytes of a log that hold its last line.
_TAIL = 65_536
# The code of a process that another one has stopped.
_OTHERS = "ABORTED"
_ERROR = "error: "


@dataclass(frozen=True)
class End:
    """The end of a run.

    ``state``: ``set aside``, ``failed``, ``stopped``, or ``unfinished``: it runs now, or was
    killed. ``why``: a sentence, '' if none is known. ``resumes``: whether the same commands resume
    it: not a simulation, not a prediction.
    """

    state: str
    why: str = ""
    resumes: bool = True

    @property
    def said(self) -> str:
        """Words it for a person."""
        if self.state == "unfinished":
            return "the run has not ended yet; if it was interrupted, the same commands resume it"
        if self.state == "set aside":
            return f"the run was set aside, and nobody resumes it ({self.why})"
        what = f"the run {'has failed' if self.state == 'failed' else 'was stopped'}"
        what += f" ({self.why})" if self.why and self.state == "failed" else ""
        if not self.resumes:
            return what
        return (
            f"{what}; the same commands resume "
            f"it{', once that is mended' if self.state == 'failed' else ''}"
        )


def end_of(processes: Sequence[Source]) -> End:
    """Returns how an unfinished run has ended, as far as a log, or what a process said before it
    had one, says so.
    """
    aside = [each.read("run.json").get("set_aside") for each in processes]
    if whys := [str(noted.get("why", "")) for noted in aside if isinstance(noted, dict)]:
        return End("set aside", clean(whys[0], LINE), resumes=False)
    lines = [_last(each.folder / "log.jsonl") for each in processes]
    paths = {path for each in processes for path in each.folder.parent.glob("*/stderr")}
    said = [
        line
        for line in (_last_line(path).decode("utf-8", "replace") for path in sorted(paths))
        if line
    ]
    errors = [line.removeprefix(_ERROR) for line in said if line.startswith(_ERROR)]
    events = {str(line.get("event", "")) for line in lines} | ({"failed"} if errors else set())
    state = next((event for event in _ENDS if event in events), "unfinished")
    failed = [line for line in lines if line.get("event") == "failed"]
    # Who has stopped because of another says less.
    failed.sort(key=lambda line: line.get("code") == _OTHERS)
    why = next(
        (str(line["message"]) for line in failed if line.get("message")),
        errors[0] if errors else "",
    )
    alone = any((each.folder.parent / "federation").is_dir() for each in processes)
    resumes = not alone and all(each.read("run.json").get("job") != "predict" for each in processes)
    return End(state, clean(why, LINE), resumes)


def _last(log: Path) -> dict[str, Any]:
    """Returns the last whole line of a log; empty if there is none."""
    try:
        found = json.loads(_last_line(log))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(path: Path) -> bytes:
    """Returns the last line of a file that is not empty; b'' if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return b""
