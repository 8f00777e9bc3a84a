"""Writes logs as JSON lines, and reports events to the person or program that started this process.

A log line has time, level, version, run, party (its writer), event and message, but never ids or
values of rows. Events go to standard output: as sentences at a terminal, and as JSON lines to a
program such as ``vfl simulate``. With ``log_to_stdout``, the log's lines are written there instead
of events.
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
from vfl_common.text import LINE, clean, format_percent, list_names, to_json

log = logging.getLogger(__name__)

# The maximum number of lines that wait for the log's file.
_MAX_EARLY_LINES = 1_000

_RECORD_KEYS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# The keys that every log line has, and the keys of an error.
_STANDARD_KEYS = frozenset(
    {"time", "level", "version", "run", "party", "message", "event", "exception", "code"}
)
_WARNINGS = frozenset({"lost", "away", "interrupted", "server_away", "set_aside"})


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON, with the fields in ``extra``.

    A field with the name of a standard key gets a final ``_``: ``party`` is the writer of the line,
    and ``party_`` the party that the line is about.
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
            key: _cut_text(value)
            for key, value in record.__dict__.items()
            if key not in _RECORD_KEYS
        }
        line |= {f"{key}_" if key in line else key: value for key, value in facts.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line)


class _LogFile(RotatingFileHandler):
    def doRollover(self) -> None:  # noqa: N802 - logging's name
        """Begins a new file. If the older files cannot be renamed, continues in the same file."""
        with contextlib.suppress(OSError):
            super().doRollover()

    # The number of lines that could not be written since the last written line.
    missing = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, preceded by a note if earlier lines are missing."""
        num_missing, self.missing = self.missing, 0
        if num_missing:
            facts = {"msg": f"up to {num_missing:,} lines are missing here: the disk was full"}
            level = {"levelname": "WARNING", "event": "missing", "lines": num_missing}
            super().emit(logging.makeLogRecord({**facts, **level}))
        if self.missing:
            # The disk is still full. The line is dropped too, because without the note nobody would
            # notice the gap before it.
            self.missing = num_missing + 1
            return
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's name
        """Drops a line if the disk is full. The run ends with an error at the next important
        file.
        """
        self.missing += 1


class _StdoutLog(logging.StreamHandler[TextIO]):
    """Writes the lines of the log to standard output, even before the run has a name."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setLevel(logging.INFO)
        self.setFormatter(JsonLines(version=version()))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drops a line if the reader is gone, because the log's file also contains it."""


class LogOnce:
    """Logs a warning only if its text differs from the last warning about the same subject, so that
    a lasting fault does not fill the disk.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_texts: dict[str, str] = {}

    def warning(self, about: str, text: str, *, exc_info: bool = False, **facts: str) -> None:
        """Logs ``text`` about the subject ``about``. ``facts``: further keys of the line."""
        if self._last_texts.get(about) != text:
            self._last_texts[about] = text
            self._log.warning("%s", text, exc_info=exc_info, extra=facts)

    def over(self, about: str) -> None:
        """Notes that a fault is over, so that the next warning about it is logged."""
        self._last_texts.pop(about, None)


class EarlyLog(logging.Handler):
    """Buffers the first log lines of a program until ``log_to`` opens a file. The folder of the
    file is only known once the run has a name.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: deque[logging.LogRecord] = deque(maxlen=_MAX_EARLY_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def utc(seconds: float) -> str:
    """Formats seconds since the epoch as ``2026-01-02T03:04:05.678Z``."""
    milliseconds = int(seconds * 1000)
    whole_seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole_seconds}.{milliseconds % 1000:03d}Z"


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
    """Buffers the log's lines from now on, until ``log_to`` opens a file."""
    root = logging.getLogger()
    root.addHandler(EarlyLog())
    # The root logger drops lines below its level before any handler sees them.
    root.setLevel(logging.INFO)


def log_to_stdout() -> None:
    """Writes the log's lines to standard output from now on, instead of events."""
    root = logging.getLogger()
    root.addHandler(_StdoutLog())
    root.setLevel(logging.INFO)


def log_to(path: Path, **always: str) -> logging.Handler:
    """Appends this program's log to ``path``, with ``always`` and the version in each line. Returns
    the handler.

    The log's size is limited, because peers and strangers can cause lines: a full file is renamed
    to end in ``.1``, as in ``files.append``. Raises InputError if the file cannot be opened.
    """
    handler = _file_handler(path, always)
    root = logging.getLogger()
    root.addHandler(handler)
    for root_handler in root.handlers:
        if isinstance(root_handler, _StdoutLog):
            root_handler.setFormatter(handler.formatter)
    for previous in [
        h
        for h in root.handlers
        if isinstance(h, logging.FileHandler | EarlyLog) and h is not handler
    ]:
        if isinstance(previous, EarlyLog):
            facts = {
                "msg": f"vfl {version()}",
                "levelname": "INFO",
                "event": "program",
            }
            handler.handle(logging.makeLogRecord(facts))
        root.removeHandler(previous)
        previous.close()
        for record in previous.records if isinstance(previous, EarlyLog) else ():
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
    """Opens a separate log with the same format and size limit as ``log_to``. Raises InputError if
    the file cannot be opened.
    """
    separate_log = logging.Logger(path.name, logging.INFO)
    separate_log.addHandler(_file_handler(path, always))
    return separate_log


class Console:
    """Reports events to a person or a program."""

    def __init__(self, program: str, *, json_lines: bool | None = None) -> None:
        self.program = program
        self._json = not sys.stdout.isatty() if json_lines is None else json_lines
        # The lock is reentrant, because a signal handler may also report an event.
        self._line_lock = threading.RLock()
        # Progress is not written to a file, which would grow with the run: metrics.jsonl contains
        # it.
        self._shows_progress = not _is_file(sys.stdout)
        # With ``log_to_stdout``, log lines are written instead of events.
        handlers = logging.getLogger().handlers
        self._silent = any(isinstance(handler, _StdoutLog) for handler in handlers)

    def emit(self, event: str, **facts: Any) -> None:
        """Reports one event as a JSON line or a sentence, and logs it. Progress is logged only for
        traces.
        """
        level = (
            logging.DEBUG
            if event == "progress"
            else logging.WARNING
            if event in _WARNINGS
            else logging.INFO
        )
        if log.isEnabledFor(level):
            extra = {
                "event": event,
                **{_avoid_reserved_key(key): value for key, value in facts.items()},
            }
            log.log(level, "%s", event, extra=extra)
        self.show(event, **facts)

    def show(self, event: str, **facts: Any) -> None:
        """Reports one event as ``emit`` does, without logging it."""
        if self._silent or (event == "progress" and not self._shows_progress):
            return
        if self._json:
            line = to_json({"event": event, "program": self.program, **facts})
        else:
            line = clean(_describe_event(self.program, event, facts), LINE)
        # print() is not used: it writes the text and the line break separately, so lines of threads
        # could mix.
        with self._line_lock:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        # The stream is closed, or has no file descriptor.
        return False


def _cut_text(value: Any) -> Any:
    """Cuts a long text, because peers may have chosen it."""
    return value[:LINE] if isinstance(value, str) else value


def _avoid_reserved_key(key: str) -> str:
    """Returns ``key``, with a final ``_`` if log records use that key themselves."""
    return f"{key}_" if key in _RECORD_KEYS else key


def format_interruption(facts: Mapping[str, Any]) -> str:
    """Returns the sentence for an event ``interrupted``. At a party the event has no deadline."""
    limit = (
        f"; the others wait at most {facts['deadline_s']:.0f} s" if "deadline_s" in facts else ""
    )
    return f"interrupted: {facts['reason']}{limit}"


def format_alignment(common: int, own: int, by: str = "") -> str:
    """Returns the sentence with the number of a party's ``own`` rows that are common to all
    parties, or that fit the description ``by``.
    """
    return (
        f"{common:,} of your {own:,} rows ({format_percent(common, own)}) are "
        f"{by or 'common to all parties'}"
    )


def format_links(facts: Mapping[str, Any]) -> str:
    """Returns the sentence for an event ``linked``."""
    return (
        f"{facts['common']:,} of your {facts['of']:,} rows are linked; threshold "
        f"{facts['threshold']:.3f}, estimated precision {facts['precision']:.3f} and recall "
        f"{facts['recall']:.3f}"
    )


def format_arithmetic(checkpoint: str, differs: Sequence[str]) -> str:
    """Returns the sentence for an event ``arithmetic``. ``differs``: see ``ArithmeticChange``."""
    return (
        f"resuming from checkpoint {checkpoint} with other arithmetic ({'; '.join(differs)}): from "
        "here on the run equals an uninterrupted one only up to rounding, not bit for bit"
    )


# The events of a party about its own table or machine.
NOTE_EVENTS = ("left_out", "advice", "aligned", "linked", "unseen", "arithmetic")


def make_note_event(party: str, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Wraps one of ``NOTE_EVENTS`` in an event ``note``, for a person who runs all parties on one
    machine.
    """
    return {
        "event": "note",
        "party": party,
        "note": f"{party}: {_describe_event('vfl-party', event, dict(facts))}",
    }


def format_line(line: Mapping[str, Any]) -> str:
    """Returns a log line as text for a person: its message, or the sentence for its event."""
    event, message = str(line.get("event", "")), str(line.get("message", ""))
    if message != event:
        return message
    # ``JsonLines`` appends a ``_`` to some keys.
    facts = {
        key.removesuffix("_"): value for key, value in line.items() if key not in _STANDARD_KEYS
    }
    try:
        return _describe_event("", event, facts).strip()
    except (KeyError, TypeError, ValueError, AttributeError):
        return event


def _describe_event(program: str, event: str, facts: dict[str, Any]) -> str:
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
        return format_interruption(facts)
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
        return format_arithmetic(facts["checkpoint"], facts["differs"])
    if event == "aligned":
        return format_alignment(facts["common"], facts["of"], facts.get("by", ""))
    if event == "linked":
        return format_links(facts)
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
        batches = f"  batch {facts['batch']}/{facts['batches']}" if facts.get("batches") else ""
        position = f"{facts['phase']}  round {facts['round']}/{facts['rounds']}{batches}"
        return f"{position}  {metrics}  {facts.get('note', '')}".rstrip()
    details = "  ".join(f"{key} {value}" for key, value in facts.items() if value not in ("", None))
    return f"{event}  {details}"


class Rate:
    """Limits the messages of each sender: first passes ``at_once`` messages, then one every
    ``every_s`` seconds. Counts the messages that are held back.

    Any thread may call it. Senders are names in certificates, so there are few of them.
    """

    def __init__(self, every_s: float, at_once: int) -> None:
        self._every_s, self._ahead_s = every_s, every_s * (at_once - 1)
        self._lock = threading.Lock()
        # {sender: the time at which its next message is due at an even rate}
        self._next_s: dict[str, float] = {}
        # {sender: the number of messages held back since its last message that passed}
        self._held: dict[str, int] = {}

    def passes(self, sender: str, now_s: float) -> int | None:
        """Returns None if this message is held back. Otherwise returns the number of messages held
        back since the sender's last message that passed.
        """
        with self._lock:
            due_s = max(self._next_s.get(sender, now_s), now_s)
            if due_s - now_s > self._ahead_s:
                self._held[sender] = self._held.get(sender, 0) + 1
                return None
            self._next_s[sender] = due_s + self._every_s
            return self._held.pop(sender, 0)


def append_held_count(text: str, held: int) -> str:
    """Appends the number of messages held back, as in ``collapsing (and 37 more)``."""
    return f"{text} (and {held} more)" if held else text
