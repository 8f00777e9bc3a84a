"""Stores checkpoints without pickle: one file each, tensors in safetensors, the rest as JSON in its
header.

    000007-000003.splitnn.12.safetensors            the store's own count, then the label
    .tmp-000008-000004.splitnn.13.safetensors       being written; the next save removes leftovers
    aside-000008-000004.splitnn.13.safetensors      discarded; removed when a newer one is stored
    damaged-000008-000004.splitnn.13.safetensors    its SHA-256 differs; a few are kept

The header's metadata has ``vfl`` (label and tree, JSON) and ``sha256`` (of the file without this
entry). A file is renamed to its name after all its bytes are on the disk: a crash at any point
leaves only whole checkpoints. One process at a time uses a store, and one thread of it.

Parties that resume need a label that all of them hold. Why ``keep`` = 2 is enough, though
``save_later`` returns before the file is on the disk: a party that finishes round k has heard in
that round from every other party, which has thus returned from its own save of round k - 1. That
save first waited for the one of round k - 2, so the label k - 2 is on every disk when the first
party saves label k. It may be the newest one at a party that is killed now. So the label k - 2 must
stay with k - 1 and k, and may go when the save of k + 1 begins: by the same argument all hold k - 1
then. Hence a save removes the older files before it writes, not after: ``keep`` stay, and the new
one comes on top.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from vfl_common.errors import Code, InputError, InternalError
from vfl_common.files import fsync_folder, write_error

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
ASIDE, DAMAGED = "aside-", "damaged-"
_PLAIN = frozenset({bool, int, float, str})
# The number of damaged files that stay, so that a failing disk does not fill up.
MAX_DAMAGED = 3
FILE = re.compile(r"(\d+)-([\w.-]+)\.safetensors")


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Splits a tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None into
    (tensors, JSON value).

    Copies each tensor to the CPU by itself: two that shared memory do not share it after
    ``unpack``. Keys of dicts may be anything but tensors. In JSON a list is a list, and an object
    is one of ``{"dict": [[key, value]…]}``, ``{"tuple": […]}``, ``{"tensor": name}``. Raises
    InternalError for anything else.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any) -> Any:
        # Most nodes are plain values.
        if node is None or type(node) in _PLAIN:
            return node
        if isinstance(node, Tensor):
            name = str(len(tensors))
            tensors[name] = node.detach().to(
                "cpu", copy=True, memory_format=torch.contiguous_format
            )
            return {"tensor": name}
        if isinstance(node, dict):
            return {"dict": [[walk(key), walk(value)] for key, value in node.items()]}
        if isinstance(node, tuple):
            return {"tuple": [walk(item) for item in node]}
        if isinstance(node, list):
            return [walk(item) for item in node]
        # A subclass of a plain type.
        if isinstance(node, int | float | str):
            return node
        raise InternalError(f"a {type(node).__name__} cannot be stored in a checkpoint")

    jsonable = walk(tree)
    return tensors, jsonable


def unpack(tensors: dict[str, Tensor], jsonable: Any) -> Any:
    """Rebuilds the tree that ``pack`` split. Raises KeyError, TypeError or ValueError if the parts
    do not fit.
    """

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "tuple":
            return tuple(walk(item) for item in value)
        if kind == "dict":
            return {walk(key): walk(item) for key, item in value}
        raise ValueError(f"unknown node {kind!r}")

    return walk(jsonable)


# The errors that reading a damaged file raises.
_DAMAGED = (ValueError, KeyError, TypeError, safetensors.SafetensorError)


class _Entry(NamedTuple):
    sequence: int
    label: str
    path: Path


class CheckpointStore:
    """The newest checkpoint of one process and ``keep`` older ones, in its own folder.

    Args:
        folder: created if missing. Raises InputError if that fails.
        keep: at least 1.

    Labels hold letters, digits and ``_.-``. Checkpoints are ordered by the count in their files'
    names, not by time or label. A thread of the store writes them, one at a time; every method
    waits for it first, and raises the InputError of a write that failed since the last call.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise InternalError(f"a checkpoint store must keep at least 1 checkpoint (got {keep})")
        self._folder, self._keep = folder, keep
        # Starts with the first checkpoint.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        # Stamps of files that this process has written, or found undamaged.
        self._verified: set[tuple[str, int, int]] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error, code=Code.CHECKPOINT_INVALID) from error

    def save(self, label: str, tree: Any) -> None:
        """Removes all but the newest ``keep`` complete checkpoints, then writes ``tree`` as
        ``label`` to the disk.

        Replaces a checkpoint of the same label. Raises InternalError for a label or a node that
        cannot be stored, and InputError (CHECKPOINT_INVALID) if writing fails.
        """
        self.save_later(label, tree)
        self.flush()

    def save_later(self, label: str, tree: Any) -> None:
        """Copies ``tree``, which may change afterwards, and lets the store's thread do what
        ``save`` does.

        Raises InternalError as ``save`` does. If writing fails, the next call of any method raises
        the InputError.
        """
        self.flush()
        paths = self._paths()
        last = max((entry.sequence for entry in _parse_entries(paths)), default=0)
        name = f"{max(last, _last_damaged(paths)) + 1:06d}-{label}{SUFFIX}"
        if not FILE.fullmatch(name):
            raise InternalError(f"{label!r} cannot be a checkpoint's label")
        tensors, jsonable = pack(tree)
        about = json.dumps({"label": label, "tree": jsonable})
        self._writing = self._thread.submit(self._write, name, tensors, about)

    def flush(self) -> None:
        """Returns when the last checkpoint is on the disk. Raises InputError (CHECKPOINT_INVALID)
        if writing failed.
        """
        writing = self._writing
        if writing is None:
            return
        try:
            writing.result()
        finally:
            # It is not if Ctrl-C ended the wait.
            if writing.done():
                self._writing = None

    def _write(self, name: str, tensors: dict[str, Tensor], about: str) -> None:
        header, body = _with_sha256(_plain(tensors, about))
        path, temporary = self._folder / name, self._folder / f".tmp-{name}"
        try:
            paths = self._paths()
            entries = self._files(paths)
            retained = self._complete(entries)[-self._keep :]
            unwanted = [entry.path for entry in entries if entry not in retained]
            for left in (*unwanted, *_starting(".tmp-", paths)):
                left.unlink(missing_ok=True)
            with os.fdopen(
                os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(header)
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            fsync_folder(self._folder)
            # Somebody may have tidied up meanwhile.
            for left in _starting(ASIDE, paths):
                left.unlink(missing_ok=True)
            self._verified &= {_stamp(entry.path) for entry in retained}
            self._verified.add(_stamp(path))
        except OSError as error:
            # The first error is the one to report.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise write_error(
                self._folder, error, "cannot write a checkpoint", Code.CHECKPOINT_INVALID
            ) from error

    def labels(self) -> list[str]:
        """Returns the labels of complete checkpoints (their header is readable and fits the size),
        oldest first.
        """
        self.flush()
        return [entry.label for entry in self._complete(self._files(self._paths()))]

    def count_saved(self) -> int:
        """Returns how many checkpoints this run has written up to the newest that is here, damaged
        or not.
        """
        self.flush()
        paths = self._paths()
        last = max((entry.sequence for entry in self._complete(self._files(paths))), default=0)
        return max(last, _last_damaged(paths))

    def whole(self) -> list[str]:
        """Returns the labels of checkpoints that pass their SHA-256, oldest first; sets damaged
        files aside.

        Hashes each file once, and none that this process has written: a party that joins again does
        not read gigabytes. Raises InputError (CHECKPOINT_INVALID) if a file cannot be read, which
        says nothing about what it holds.
        """
        self.flush()
        for entry in self._files(self._paths()):
            try:
                stamp = _stamp(entry.path)
                if stamp not in self._verified:
                    _read(entry.path)
                self._verified.add(stamp)
            except OSError as error:
                raise InputError(
                    Code.CHECKPOINT_INVALID,
                    f"{entry.path}: cannot be read ({error.strerror}). Make it readable, or remove "
                    "it to resume without it.",
                ) from error
            except _DAMAGED as error:
                self._set_damaged_aside(entry.path, error)
        return self.labels()

    def _set_damaged_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_name(DAMAGED + path.name)
        with self._convert_os_errors("cannot set a damaged checkpoint aside"):
            path.rename(aside)
            for older in sorted(self._folder.glob(f"{DAMAGED}*"))[:-MAX_DAMAGED]:
                older.unlink()
        log.warning(
            "%s: the checkpoint is damaged (%s); it was renamed to %s, and the run resumes without "
            "it",
            path,
            error,
            aside.name,
            extra={"event": "damaged"},
        )

    def load(self, label: str) -> Any:
        """Returns the tree that was saved as ``label``, with tensors on the CPU.

        Raises InputError (CHECKPOINT_INVALID) if it is missing or damaged.
        """
        self.flush()
        entry = self._find(label)
        try:
            tensors, about = _read(entry.path)
            return unpack(tensors, json.loads(about)["tree"])
        except (OSError, *_DAMAGED) as error:
            raise InputError(
                Code.CHECKPOINT_INVALID,
                f"{entry.path}: the checkpoint is damaged ({error}). Restore it; an unfinished run "
                "resumes without it.",
            ) from error

    def discard_after(self, label: str) -> None:
        """Sets all checkpoints newer than ``label`` aside; all of them if ``label`` is empty.

        They are not removed at another party's word: they stay until this store has written a
        checkpoint, or sets others aside. Raises InputError (CHECKPOINT_INVALID) if ``label`` is
        missing, or if a file cannot be renamed.
        """
        self.flush()
        last = self._find(label).sequence if label else -1
        newer = [entry for entry in self._files(self._paths()) if entry.sequence > last]
        with self._convert_os_errors("cannot set checkpoints aside"):
            for left in self._folder.glob(f"{ASIDE}*") if newer else ():
                left.unlink()
            for entry in reversed(newer):
                entry.path.rename(entry.path.with_name(ASIDE + entry.path.name))
            # The count restarts, too.
            for path in self._folder.glob(f"{DAMAGED}*") if not label else ():
                path.rename(path.with_name(ASIDE + path.name))

    def _find(self, label: str) -> _Entry:
        entries = self._complete(self._files(self._paths()))
        for entry in reversed(entries):
            if entry.label == label:
                return entry
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{self._folder}: the checkpoint does not exist (got {label}). Choose one of: "
            f"{', '.join(entry.label for entry in entries) or 'none'}.",
        )

    def _paths(self) -> list[Path]:
        with self._convert_os_errors("cannot list the checkpoints"):
            return list(self._folder.iterdir())

    def _files(self, paths: Iterable[Path]) -> list[_Entry]:
        """Returns the files that have a checkpoint's name, in the order of their count."""
        with self._convert_os_errors("cannot list the checkpoints"):
            return [entry for entry in _parse_entries(paths) if entry.path.is_file()]

    def _complete(self, entries: list[_Entry]) -> list[_Entry]:
        """Returns the complete ones among ``entries``, one a label; opens none that is known to be
        whole.
        """
        newest = {
            entry.label: entry
            for entry in entries
            if self._is_verified(entry) or _is_complete(entry)
        }
        return sorted(newest.values())

    def _is_verified(self, entry: _Entry) -> bool:
        try:
            return _stamp(entry.path) in self._verified
        except OSError:
            return False

    @contextlib.contextmanager
    def _convert_os_errors(self, what: str) -> Iterator[None]:
        """Raises an OSError of the block as the InputError of ``unwritable``."""
        try:
            yield
        except OSError as error:
            raise write_error(self._folder, error, what, Code.CHECKPOINT_INVALID) from error


def _parse_entries(paths: Iterable[Path]) -> list[_Entry]:
    """Returns all that has a checkpoint's name: a folder too, whose name no file can take."""
    matches = [(FILE.fullmatch(path.name), path) for path in paths]
    return sorted(_Entry(int(match[1]), match[2], path) for match, path in matches if match)


def _starting(prefix: str, paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.name.startswith(prefix)]


def _last_damaged(paths: Iterable[Path]) -> int:
    """Returns the count of the newest damaged file, 0 if there is none: what is written later has a
    higher one.
    """
    names = [path.name.removeprefix(DAMAGED) for path in _starting(DAMAGED, paths)]
    return max((int(match[1]) for match in map(FILE.fullmatch, names) if match), default=0)


def _is_complete(entry: _Entry) -> bool:
    try:
        return bool(json.loads(_metadata(entry.path)["vfl"])["label"] == entry.label)
    except (OSError, *_DAMAGED):
        return False


def _stamp(path: Path) -> tuple[str, int, int]:
    """Returns what changes with the file: its name, its size, the time when it was written."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    """Reads (tensors, label and tree as JSON). Raises OSError, or one of ``_DAMAGED`` if the
    SHA-256 differs.
    """
    data, metadata = path.read_bytes(), _metadata(path)
    tensors = safetensors.torch.load(data)
    if metadata["sha256"] != hashlib.sha256(_plain(tensors, metadata["vfl"])).hexdigest():
        raise ValueError("the SHA-256 differs")
    return tensors, metadata["vfl"]


def _metadata(path: Path) -> dict[str, str]:
    """Reads the header's metadata. Raises SafetensorError if it is unreadable or does not fit the
    file's size.
    """
    # The torch framework opens the file again, and does not report that it is gone.
    with safe_open(path, framework="np") as file:
        return dict(file.metadata() or {})


def _plain(tensors: dict[str, Tensor], about: str) -> bytes:
    """Returns the file without its SHA-256: names, shapes, dtypes, label and tree, and every byte
    of the tensors.
    """
    return safetensors.torch.save(tensors, {"vfl": about})


def _with_sha256(plain: bytes) -> tuple[bytes, memoryview]:
    """Returns what the file begins with, up to the end of its header, and the tensors' bytes.

    A safetensors file is the header's length (8 bytes, little-endian), the header (JSON, filled up
    with spaces), and the tensors, whose places the header counts from its own end. So an entry more
    in the header moves nothing else, and the tensors need not be serialised twice.
    """
    end = 8 + int.from_bytes(plain[:8], "little")
    fields = json.loads(plain[8:end])
    fields["__metadata__"]["sha256"] = hashlib.sha256(plain).hexdigest()
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, memoryview(plain)[end:]
