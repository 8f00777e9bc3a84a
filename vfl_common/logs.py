"""Logs as JSON lines, and the events that a program tells whoever started it.

A log line has time, level, run, party (who writes it), event and message; never ids or values of rows. Events go to
standard output: as sentences for a person at a terminal, as JSON lines for a program (``vfl simulate``, the tests).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from vfl_common.files import unwritable

log = logging.getLogger(__name__)

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line; what a call passes as ``extra`` is part of it.

    A fact that is called as something that each line has gets a ``_`` at its end: ``party`` is who writes, ``party_``
    whom the line is about.
    """

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            **self._always,
            "message": record.getMessage(),
        }
        facts = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        line |= {f"{key}_" if key in line else key: value for key, value in facts.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A line that the disk has no room for is lost: the run ends with a sentence at the next file that counts."""


def utc(seconds: float) -> str:
    """``2026-01-02T03:04:05.678Z`` of seconds since the epoch."""
    milliseconds = int(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def log_to(path: Path, **always: str) -> logging.Handler:
    """Appends this program's log to ``path``; ``always`` is part of each line. Returns the handler.

    Raises InputError where the file cannot be opened.
    """
    try:
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from None
    handler.setFormatter(JsonLines(**always))
    root = logging.getLogger()
    for older in [h for h in root.handlers if isinstance(h, logging.FileHandler)]:
        root.removeHandler(older)
        older.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


class Console:
    """Tells a person or a program what happens."""

    def __init__(self, program: str, *, json_lines: bool | None = None) -> None:
        self.program = program
        self._json = not sys.stdout.isatty() if json_lines is None else json_lines

    def emit(self, event: str, **facts: Any) -> None:
        """One event: a JSON line, or a sentence; all but progress go to the log too."""
        if event != "progress":
            log.info("%s", event, extra={"event": event, **{_free(key): value for key, value in facts.items()}})
        if self._json:
            print(json.dumps({"event": event, "program": self.program, **facts}, default=str), flush=True)
        else:
            print(_sentence(self.program, event, facts), flush=True)


def _free(key: str) -> str:
    """A key that a log record does not use itself."""
    return f"{key}_" if key in _STANDARD else key


def _sentence(program: str, event: str, facts: dict[str, Any]) -> str:
    if event == "ready":
        return f"{program} listens on {facts['address']}"
    if event == "metrics":
        return f"metrics at http://{facts['address']}/metrics"
    if event == "waiting":
        why = f": {facts['why']}" if facts.get("why") else ""
        return f"waiting for {', '.join(facts['missing'])} ({facts['left_s']:.0f} s left){why}"
    if event == "progress":
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in facts.get("metrics", {}).items())
        within = f"  batch {facts['batch']}/{facts['batches']}" if facts.get("batches") else ""
        done = f"{facts['phase']}  round {facts['round']}/{facts['rounds']}{within}"
        return f"{done}  {metrics}  {facts.get('note', '')}".rstrip()
    rest = "  ".join(f"{key} {value}" for key, value in facts.items() if value not in ("", None))
    return f"{event}  {rest}"
