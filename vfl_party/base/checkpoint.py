"""Stores checkpoints without pickle. Each checkpoint is a safetensors file with tensors, and other
values as JSON in its header.

    000007-000003.splitnn.12.safetensors            a counter of the store, then the label
    .tmp-000008-000004.splitnn.13.safetensors       being written; the next save removes old ones
    aside-000008-000004.splitnn.13.safetensors      discarded; removed when a newer one is stored
    damaged-000008-000004.splitnn.13.safetensors    its SHA-256 differs; a few are kept

The header's metadata has ``vfl`` (label and tree, JSON) and ``sha256`` (the SHA-256 of the file
without this entry). A file gets its final name after all its bytes are on the disk, so a crash at
any point leaves only complete checkpoints. Only one thread of one process may use a store.

To resume, all parties need a checkpoint with the same label. ``keep`` = 2 is enough, although
``save_later`` returns before the file is on the disk. A party that finishes round k has received
messages of round k from every other party. So every other party has returned from its own save of
round k - 1, which first waited for the save of round k - 2. Therefore label k - 2 is on every disk
when the first party saves label k, and it may be the newest label of a party that is killed then.
So a store must keep label k - 2 until the save of label k + 1 begins, when all parties have label k
- 1. Hence a save removes old files before it writes the new one.
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
# The maximum number of damaged files to keep, so that a failing disk does not fill up.
MAX_DAMAGED = 3
FILE = re.compile(r"(\d+)-([\w.-]+)\.safetensors")


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Splits a tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None into
    tensors and a JSON value.

    Each tensor is copied to the CPU. Tensors that share memory do not share it after ``unpack``.
    Keys of dicts may have any type but tensors. In JSON a list is a list, and an object is one of
    ``{"dict": [[key, value]…]}``, ``{"tuple": […]}``, ``{"tensor": name}``. Raises InternalError
    for other types.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any) -> Any:
        # Most nodes are plain values, so they are tested first.
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
        # Subclasses of plain types, such as enums, are stored as they are.
        if isinstance(node, int | float | str):
            return node
        raise InternalError(f"a {type(node).__name__} cannot be stored in a checkpoint")

    jsonable = walk(tree)
    return tensors, jsonable


def unpack(tensors: dict[str, Tensor], jsonable: Any) -> Any:
    """Rebuilds the tree that ``pack`` split. Raises KeyError, TypeError or ValueError if the
    tensors and the JSON value do not fit together.
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
        raise ValueError(f"the tree has a node of an unknown kind (got {kind!r})")

    return walk(jsonable)


# The errors that reading a damaged file raises.
_DAMAGED = (ValueError, KeyError, TypeError, safetensors.SafetensorError)


class _Entry(NamedTuple):
    sequence: int
    label: str
    path: Path


class CheckpointStore:
    """A folder with the newest checkpoint of one process and ``keep`` older ones.

    Labels contain letters, digits and ``_.-``. Checkpoints are ordered by the counter in their file
    names, not by time or label. A thread writes the checkpoints one at a time. Every method first
    waits for this thread, and raises the InputError of a write that failed since the last call.

    Args:
        folder: The folder, which is created if missing. Raises InputError if that fails.
        keep: The number of older checkpoints to keep, at least 1.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise InternalError(f"a checkpoint store must keep at least 1 checkpoint (got {keep})")
        self._folder, self._keep = folder, keep
        # The thread starts with the first checkpoint.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        # Stamps of the files that this process has written, or has found undamaged.
        self._verified: set[tuple[str, int, int]] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error, code=Code.CHECKPOINT_INVALID) from error

    def save(self, label: str, tree: Any) -> None:
        """Removes all but the newest ``keep`` complete checkpoints, then writes ``tree`` as
        ``label`` to the disk.

        An existing checkpoint with the same label is replaced. Raises InternalError for a label or
        a node that cannot be stored, and InputError (CHECKPOINT_INVALID) if writing fails.
        """
        self.save_later(label, tree)
        self.flush()

    def save_later(self, label: str, tree: Any) -> None:
        """Copies ``tree``, which may change afterwards, and saves the copy in the store's thread.

        Raises InternalError as ``save`` does. If writing fails, the next call of any method raises
        the InputError.
        """
        self.flush()
        paths = self._list_paths()
        last = max((entry.sequence for entry in _parse_entries(paths)), default=0)
        name = f"{max(last, _get_last_damaged(paths)) + 1:06d}-{label}{SUFFIX}"
        if not FILE.fullmatch(name):
            raise InternalError(
                f"the label of a checkpoint must have only letters, digits and _.- (got {label!r})"
            )
        tensors, jsonable = pack(tree)
        about = json.dumps({"label": label, "tree": jsonable})
        self._writing = self._thread.submit(self._write, name, tensors, about)

    def flush(self) -> None:
        """Waits until the last checkpoint is on the disk. Raises InputError (CHECKPOINT_INVALID) if
        writing failed.
        """
        writing = self._writing
        if writing is None:
            return
        try:
            writing.result()
        finally:
            # After Ctrl-C the write may still be running.
            if writing.done():
                self._writing = None

    def _write(self, name: str, tensors: dict[str, Tensor], about: str) -> None:
        header, body = _add_sha256(_serialise(tensors, about))
        path, temporary = self._folder / name, self._folder / f".tmp-{name}"
        try:
            paths = self._list_paths()
            entries = self._list_entries(paths)
            retained = self._select_complete(entries)[-self._keep :]
            unwanted = [entry.path for entry in entries if entry not in retained]
            for old_path in (*unwanted, *_filter_by_prefix(".tmp-", paths)):
                old_path.unlink(missing_ok=True)
            with os.fdopen(
                os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(header)
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            fsync_folder(self._folder)
            # A person may have removed the file already.
            for old_path in _filter_by_prefix(ASIDE, paths):
                old_path.unlink(missing_ok=True)
            self._verified &= {_get_stamp(entry.path) for entry in retained}
            self._verified.add(_get_stamp(path))
        except OSError as error:
            # An error of this removal must not hide the first error.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise write_error(
                self._folder, error, "cannot write a checkpoint", Code.CHECKPOINT_INVALID
            ) from error

    def labels(self) -> list[str]:
        """Returns the labels of complete checkpoints, oldest first. A checkpoint is complete if its
        header is readable and fits the file's size.
        """
        self.flush()
        return [
            entry.label for entry in self._select_complete(self._list_entries(self._list_paths()))
        ]

    def count_saved(self) -> int:
        """Returns the number of checkpoints that this run has written, up to the newest file,
        damaged or not.
        """
        self.flush()
        paths = self._list_paths()
        last = max(
            (entry.sequence for entry in self._select_complete(self._list_entries(paths))),
            default=0,
        )
        return max(last, _get_last_damaged(paths))

    def whole(self) -> list[str]:
        """Returns the labels of checkpoints whose SHA-256 is right, oldest first. Renames damaged
        files.

        Each file is hashed only once, and files from this process are not hashed, so that a party
        that joins again does not read gigabytes. Raises InputError (CHECKPOINT_INVALID) if a file
        cannot be read.
        """
        self.flush()
        for entry in self._list_entries(self._list_paths()):
            try:
                stamp = _get_stamp(entry.path)
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

        Raises InputError (CHECKPOINT_INVALID) if the checkpoint is missing or damaged.
        """
        self.flush()
        entry = self._find_entry(label)
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
        """Renames all checkpoints newer than ``label``, so that they are no longer used; all
        checkpoints if ``label`` is empty.

        The renamed files stay until this store has written a checkpoint or renames newer files,
        because another party may have asked for this by mistake. Raises InputError
        (CHECKPOINT_INVALID) if ``label`` is missing, or if a file cannot be renamed.
        """
        self.flush()
        last = self._find_entry(label).sequence if label else -1
        newer = [entry for entry in self._list_entries(self._list_paths()) if entry.sequence > last]
        with self._convert_os_errors("cannot set checkpoints aside"):
            for path in self._folder.glob(f"{ASIDE}*") if newer else ():
                path.unlink()
            for entry in reversed(newer):
                entry.path.rename(entry.path.with_name(ASIDE + entry.path.name))
            # The counter restarts, so the damaged files are renamed as well.
            for path in self._folder.glob(f"{DAMAGED}*") if not label else ():
                path.rename(path.with_name(ASIDE + path.name))

    def _find_entry(self, label: str) -> _Entry:
        entries = self._select_complete(self._list_entries(self._list_paths()))
        for entry in reversed(entries):
            if entry.label == label:
                return entry
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"{self._folder}: the checkpoint does not exist (got {label}). Choose one of: "
            f"{', '.join(entry.label for entry in entries) or 'none'}.",
        )

    def _list_paths(self) -> list[Path]:
        with self._convert_os_errors("cannot list the checkpoints"):
            return list(self._folder.iterdir())

    def _list_entries(self, paths: Iterable[Path]) -> list[_Entry]:
        """Returns the files with the name of a checkpoint, in the order of their counters."""
        with self._convert_os_errors("cannot list the checkpoints"):
            return [entry for entry in _parse_entries(paths) if entry.path.is_file()]

    def _select_complete(self, entries: list[_Entry]) -> list[_Entry]:
        """Returns the complete checkpoints among ``entries``, one for each label. Verified files
        are not opened.
        """
        newest = {
            entry.label: entry
            for entry in entries
            if self._is_verified(entry) or _is_complete(entry)
        }
        return sorted(newest.values())

    def _is_verified(self, entry: _Entry) -> bool:
        try:
            return _get_stamp(entry.path) in self._verified
        except OSError:
            return False

    @contextlib.contextmanager
    def _convert_os_errors(self, what: str) -> Iterator[None]:
        """Converts an OSError of the block to an InputError. ``what``: The failed action."""
        try:
            yield
        except OSError as error:
            raise write_error(self._folder, error, what, Code.CHECKPOINT_INVALID) from error


def _parse_entries(paths: Iterable[Path]) -> list[_Entry]:
    """Returns all files and folders with a checkpoint's name, in the order of their counters."""
    matches = [(FILE.fullmatch(path.name), path) for path in paths]
    return sorted(_Entry(int(match[1]), match[2], path) for match, path in matches if match)


def _filter_by_prefix(prefix: str, paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.name.startswith(prefix)]


def _get_last_damaged(paths: Iterable[Path]) -> int:
    """Returns the counter of the newest damaged file, 0 if there is none. New checkpoints get
    higher counters.
    """
    names = [path.name.removeprefix(DAMAGED) for path in _filter_by_prefix(DAMAGED, paths)]
    return max((int(match[1]) for match in map(FILE.fullmatch, names) if match), default=0)


def _is_complete(entry: _Entry) -> bool:
    try:
        return bool(json.loads(_read_metadata(entry.path)["vfl"])["label"] == entry.label)
    except (OSError, *_DAMAGED):
        return False


def _get_stamp(path: Path) -> tuple[str, int, int]:
    """Returns the name, the size and the modification time of a file, to notice changes."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    """Reads a file. Returns its tensors, and its label and tree as JSON. Raises OSError, or an
    exception of ``_DAMAGED`` if the SHA-256 differs.
    """
    data, metadata = path.read_bytes(), _read_metadata(path)
    tensors = safetensors.torch.load(data)
    if metadata["sha256"] != hashlib.sha256(_serialise(tensors, metadata["vfl"])).hexdigest():
        raise ValueError("the SHA-256 differs")
    return tensors, metadata["vfl"]


def _read_metadata(path: Path) -> dict[str, str]:
    """Reads the metadata in the header. Raises SafetensorError if the header is unreadable or does
    not fit the file's size.
    """
    # framework="torch" would open the file a second time, and would not report a missing file.
    with safe_open(path, framework="np") as file:
        return dict(file.metadata() or {})


def _serialise(tensors: dict[str, Tensor], about: str) -> bytes:
    """Returns the content of a checkpoint file without its SHA-256."""
    return safetensors.torch.save(tensors, {"vfl": about})


def _add_sha256(content: bytes) -> tuple[bytes, memoryview]:
    """Adds the SHA-256 to the header of a file. Returns the start of the file, up to the end of the
    header, and the bytes of the tensors.

    A safetensors file consists of the header's length (8 bytes, little-endian), the header (JSON,
    padded with spaces) and the tensors. The header gives the offsets of the tensors from its own
    end. So another entry in the header changes no offset, and the tensors need not be serialised
    twice.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    fields = json.loads(content[8:end])
    fields["__metadata__"]["sha256"] = hashlib.sha256(content).hexdigest()
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, memoryview(content)[end:]
