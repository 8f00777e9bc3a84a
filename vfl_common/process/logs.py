"""Writes logs as JSON lines, and reports events to the person or program that started this one.

A log line has time, level, version, run, party (its writer), event and message; never ids or values
of rows. Events go to standard output: as sentences for a person at a terminal, as JSON lines for a
program (``vfl simulate``, the tests). With ``log_to_stdout`` the log's lines go there instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from vfl_common.files import MAX_FILE_BYTES, OLDER, write_error
from vfl_common.text import LINE, clean, list_names, percent, to_json

log = logging.getLogger(__name__)

# The most lines that wait for the log's file.
_MAX_EARLY = 1_000

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# The keys that every line of a log has, and those of an error.
_ALWAYS = frozenset(
    {"time", "level", "version", "run", "party", "message", "event", "exception", "code"}
)
_WARNINGS = frozenset({"lost", "away", "interrupted", "server_away", "set_aside"})


class JsonLines(logging.Formatter):
    """Writes one JSON object a line, with the call's ``extra``.

    A fact with the name of a standard key gets a ``_`` at its end: ``party`` is the writer,
    ``party_`` the party that the line is about.
    """

    def __init__(self, **always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            **self._always,
            "message": record.getMessage()[:LINE],
        }
        facts = {
            key: _cut_text(value) for key, value in record.__dict__.items() if key not in _STANDARD
        }
        line |= {f"{key}_" if key in line else key: value for key, value in facts.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line)


class _LogFile(RotatingFileHandler):
    def doRollover(self) -> None:  # noqa: N802 - logging's name
        """Begins a new file; if the older ones cannot be renamed, goes on in the same file."""
        with contextlib.suppress(OSError):
            super().doRollover()

    # The count of lines that could not be written since the last one that was written.
    missing = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, and before it how many lines are missing."""
        before, self.missing = self.missing, 0
        if before:
            facts = {"msg": f"up to {before:,} lines are missing here: the disk was full"}
            level = {"levelname": "WARNING", "event": "missing", "lines": before}
            super().emit(logging.makeLogRecord({**facts, **level}))
        if self.missing:
            # The disk is still full; without the note, nobody would notice the gap before the line.
            self.missing = before + 1
            return
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's name
        """Drops a line if the disk is full: the run ends with an error at the next important "
        "file."""
        self.missing += 1


class _StdoutLog(logging.StreamHandler[TextIO]):
    """Writes the lines of the log to standard output, even before the run has a name."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setLevel(logging.INFO)
        self.setFormatter(JsonLines(version=version()))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drops a line if the reader is gone: the log's file has it, too."""


class LogOnce:
    """Logs a warning only if its text differs from the last one about the same subject, so that a
    lasting fault does not fill the disk with one line per request.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: dict[str, str] = {}

    def warning(self, about: str, text: str, *, exc_info: bool = False, **facts: str) -> None:
        """Logs ``text`` about the subject ``about``. ``facts``: the line's other keys."""
        if self._told.get(about) != text:
            self._told[about] = text
            self._log.warning("%s", text, exc_info=exc_info, extra=facts)

    def over(self, about: str) -> None:
        """Notes that a fault is over: the next warning about it is logged."""
        self._told.pop(about, None)


class EarlyLog(logging.Handler):
    """Keeps the first lines of a program until ``log_to`` has a file for them: the folder of a run
    is known only with the run's name.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: deque[logging.LogRecord] = deque(maxlen=_MAX_EARLY)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def utc(seconds: float) -> str:
    """Formats seconds since the epoch as ``2026-01-02T03:04:05.678Z``."""
    milliseconds = int(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


@cache
def version() -> str:
    """Returns this program's version; '' if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    # The server is also a separate distribution (deploy/server).
    for name in ("vfl", "vfl-server"):
        with contextlib.suppress(PackageNotFoundError):
            return version_of(name)
    return ""


def buffer_early_lines() -> None:
    """Keeps the log's lines from now on, until ``log_to`` has a file for them."""
    root = logging.getLogger()
    root.addHandler(EarlyLog())
    # The root drops what is below its level before any handler sees it.
    root.setLevel(logging.INFO)


def log_to_stdout() -> None:
    """Writes the log's lines to standard output from now on, instead of events."""
    root = logging.getLogger()
    root.addHandler(_StdoutLog())
    root.setLevel(logging.INFO)


def log_to(path: Path, **always: str) -> logging.Handler:
    """Appends this program's log to ``path``, with ``always`` and the version in each line. Returns
    the handler.

    Peers and strangers cause lines, so the log's size is limited: ``.1`` is appended to the name of
    a full file, as in ``files.append``. Raises InputError if the file cannot be opened.
    """
    handler = _file_handler(path, always)
    root = logging.getLogger()
    root.addHandler(handler)
    for other in root.handlers:
        if isinstance(other, _StdoutLog):
            other.setFormatter(handler.formatter)
    for older in [
        h
        for h in root.handlers
        if isinstance(h, logging.FileHandler | EarlyLog) and h is not handler
    ]:
        if isinstance(older, EarlyLog):
            facts = {
                "msg": f"vfl {version()}",
                "levelname": "INFO",
                "event": "program",
            }
            handler.handle(logging.makeLogRecord(facts))
        root.removeHandler(older)
        older.close()
        for record in older.records if isinstance(older, EarlyLog) else ():
            handler.handle(record)
    root.setLevel(logging.INFO)
    return handler


def _file_handler(path: Path, always: Mapping[str, str]) -> logging.Handler:
    try:
        handler = _LogFile(path, maxBytes=MAX_FILE_BYTES, backupCount=OLDER, encoding="utf-8")
    except OSError as error:
        raise write_error(path, error) from None
    handler.setLevel(logging.INFO)
    handler.setFormatter(JsonLines(version=version(), **always))
    return handler


def open_separate_log(path: Path, **always: str) -> logging.Logger:
    """Returns a separate log, with the same format and limits as that of ``log_to``. Raises
    InputError if the file cannot be opened.
    """
    own = logging.Logger(path.name, logging.INFO)
    own.addHandler(_file_handler(path, always))
    return own


class Console:
    """Reports events to a person or a program."""

    def __init__(self, program: str, *, json_lines: bool | None = None) -> None:
        self.program = program
        self._json = not sys.stdout.isatty() if json_lines is None else json_lines
        # Reentrant, because the handler of a signal may report an event, too.
        self._one_line = threading.RLock()
        # A file would grow with the run; metrics.jsonl has the progress.
        self._shows_progress = not _is_file(sys.stdout)
        # With ``log_to_stdout`` the log's lines take the place of events.
        handlers = logging.getLogger().handlers
        self._silent = any(isinstance(handler, _StdoutLog) for handler in handlers)

    def emit(self, event: str, **facts: Any) -> None:
        """Reports one event as a JSON line or a sentence, and logs it. Progress is logged for
        traces only.
        """
        level = (
            logging.DEBUG
            if event == "progress"
            else logging.WARNING
            if event in _WARNINGS
            else logging.INFO
        )
        if log.isEnabledFor(level):
            extra = {"event": event, **{_free(key): value for key, value in facts.items()}}
            log.log(level, "%s", event, extra=extra)
        self.show(event, **facts)

    def show(self, event: str, **facts: Any) -> None:
        """Reports one event as ``emit`` does, without logging it."""
        if self._silent or (event == "progress" and not self._shows_progress):
            return
        if self._json:
            line = to_json({"event": event, "program": self.program, **facts})
        else:
            line = clean(_sentence(self.program, event, facts), LINE)
        # print() writes the text and the line break separately, so that lines of threads can mix.
        with self._one_line:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        # The stream is closed, or has no file descriptor.
        return False


def _cut_text(value: Any) -> Any:
    """Cuts a long text: peers choose some of them."""
    return value[:LINE] if isinstance(value, str) else value


def _free(key: str) -> str:
    """Returns a key that no log record uses itself."""
    return f"{key}_" if key in _STANDARD else key


def interruption_text(facts: Mapping[str, Any]) -> str:
    """Returns the sentence of an event ``interrupted``; at a party it has no deadline."""
    limit = (
        f"; the others wait at most {facts['deadline_s']:.0f} s" if "deadline_s" in facts else ""
    )
    return f"interrupted: {facts['reason']}{limit}"


def alignment_text(common: int, own: int, by: str = "") -> str:
    """Returns how many of a party's ``own`` rows are common to all parties, or are as ``by`` "
    "says."""
    return (
        f"{common:,} of your {own:,} rows ({percent(common, own)}) are "
        f"{by or 'common to all parties'}"
    )


def arithmetic_text(checkpoint: str, differs: Sequence[str]) -> str:
    """Returns the sentence of an event ``arithmetic``; ``differs``: see ``ArithmeticChange``."""
    return (
        f"resuming from checkpoint {checkpoint} with other arithmetic ({'; '.join(differs)}): from "
        "here on the run equals an uninterrupted one only up to rounding, not bit for bit"
    )


# Events of a party about its own table or machine.
NOTE_EVENTS = ("left_out", "advice", "aligned", "unseen", "arithmetic")


def note_event(party: str, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event ``note`` with one of ``NOTE_EVENTS``, for the person who runs all
    parties on one machine.
    """
    return {
        "event": "note",
        "party": party,
        "note": f"{party}: {_sentence('vfl-party', event, dict(facts))}",
    }


def line_text(line: Mapping[str, Any]) -> str:
    """Returns the text of a log's line for a person: its message, or the sentence of its event."""
    event, message = str(line.get("event", "")), str(line.get("message", ""))
    if message != event:
        return message
    # ``JsonLines`` appends a ``_`` to some keys.
    facts = {key.removesuffix("_"): value for key, value in line.items() if key not in _ALWAYS}
    try:
        return _sentence("", event, facts).strip()
    except (KeyError, TypeError, ValueError, AttributeError):
        return event


def _sentence(program: str, event: str, facts: dict[str, Any]) -> str:
    if event == "ready":
        return f"{program} listens on {facts['address']}"
    if event == "metrics":
        return f"metrics at http://{facts['address']}/metrics"
    if event == "left_out":
        return f"{facts['source']}: {facts['why']}"
    if event == "waiting":
        why = f": {facts['why']}" if facts.get("why") else ""
        return f"waiting for {list_names(facts['missing'])} ({facts['left_s']:.0f} s left){why}"
    if event == "interrupted":
        return interruption_text(facts)
    if event in ("away", "back") and "at" in facts:
        party, at = facts["party"], facts["at"]
        return (
            f"going on without {party} at {at}" if event == "away" else f"{party} is back at {at}"
        )
    if event == "server_away":
        return (
            f"{facts['server']} is away; training goes on without it for at most "
            f"{facts['left_s']:.0f} s"
        )
    if event == "server_back":
        return f"{facts['server']} is back"
    if event == "resumed":
        return f"resuming from checkpoint {facts['checkpoint']}"
    if event == "arithmetic":
        return arithmetic_text(facts["checkpoint"], facts["differs"])
    if event == "aligned":
        return alignment_text(facts["common"], facts["of"], facts.get("by", ""))
    if event == "realigning":
        return f"resuming the alignment: {facts['masked']:,} of {facts['of']:,} ids are masked"
    if event == "predicted":
        return f"{facts['output']}: {facts['said']}" if "output" in facts else str(facts["said"])
    if event in ("scores", "advice", "unseen", "policy", "allowed"):
        return str(facts["said"])
    if event == "set_aside":
        return f"run {facts['run']} is not resumed: {facts['why']}"
    if event == "skipped":
        return (
            f"skipping {facts['rounds']} of {facts['phase']}'s rounds: the others resume at "
            f"{facts['to']}"
        )
    if event == "refused":
        return f"refused {facts['party'] or 'a caller without a name'}: {facts['why']}"
    if event == "progress":
        metrics = "  ".join(
            f"{name} {value:.4g}" for name, value in facts.get("metrics", {}).items()
        )
        within = f"  batch {facts['batch']}/{facts['batches']}" if facts.get("batches") else ""
        done = f"{facts['phase']}  round {facts['round']}/{facts['rounds']}{within}"
        return f"{done}  {metrics}  {facts.get('note', '')}".rstrip()
    rest = "  ".join(f"{key} {value}" for key, value in facts.items() if value not in ("", None))
    return f"{event}  {rest}"
