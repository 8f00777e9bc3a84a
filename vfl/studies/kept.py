"""Finds the finished runs of a study of the library, by a digest of their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vfl_common.config.data import FRAME, DataSettings, is_path
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic

# The file in a run's folder with the digest.
FILE = "study.json"


class FinishedRuns:
    """The finished runs of a folder. Raises InputError if a digest's file is damaged."""

    def __init__(self, out: Path) -> None:
        self._folders: dict[str, Path] = {}
        for note in sorted(out.glob(f"*/{FILE}")):
            # Unfinished runs are repeated.
            if (note.parent / "summary.json").exists():
                self._folders[_inputs(note)] = note.parent

    def find(self, inputs: str) -> Path | None:
        """Returns the folder of a finished run with the same inputs."""
        return self._folders.get(inputs)

    def note(self, folder: Path, inputs: str) -> None:
        """Records the inputs in the folder of a finished run. Raises InputError."""
        write_atomic(folder / FILE, json.dumps({"inputs": inputs}) + "\n")
        self._folders[inputs] = folder


def _inputs(note: Path) -> str:
    try:
        inputs = json.loads(note.read_bytes())["inputs"]
        if isinstance(inputs, str):
            return inputs
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{note}: cannot be read ({error.strerror}). Make the file readable.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InputError(
        Code.FILE_INVALID, f"{note}: is damaged. Restore it, or remove it to repeat the run."
    )


def inputs_of(
    recipe: Recipe,
    data: Mapping[str, DataSettings],
    baseline: str | None,
    prints: Fingerprints,
    frames: Mapping[str, Any],
) -> str:
    """Returns a digest of all that determines a run's results: recipe, baseline and rows.

    Files count by their size and the time of their last change. What a name refers to does not
    count: the code of an encoder in a module, the rows of a database. ``frames``: {party: its
    frame}.
    """
    parts = [
        recipe.canonical_json(),
        str(baseline),
        *(
            f"{name} {settings.model_dump_json()} {prints.of(settings, frames)}"
            for name, settings in data.items()
        ),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Fingerprints:
    """The fingerprints of a study's data sources; each source is read once."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, data: DataSettings, frames: Mapping[str, Any]) -> str:
        """Returns a text that is equal for the same rows."""
        source = data.source
        if source not in self._known:
            if source.startswith(FRAME):
                name = source.removeprefix(FRAME)
                self._known[source] = _of_frame(frames[name], source, data)
            else:
                self._known[source] = _of_files(Path(source)) if is_path(source) else ""
        return self._known[source]


def _of_files(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    lines = []
    for file in files:
        # A missing file is an error only when it is read.
        with contextlib.suppress(OSError):
            stat = file.stat()
            lines.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Digest:
    """A writable file that only computes a digest."""

    closed = False

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _of_frame(frame: Any, source: str, data: DataSettings) -> str:
    import numpy as np
    import pyarrow

    from vfl_party.data.sources.frames import as_arrow, is_arrays

    digest = _Digest()
    if is_arrays(frame):
        for name, array in frame.items():
            own = np.ascontiguousarray(array)
            digest.write(f"{name} {own.dtype} {own.shape} ".encode())
            # An array of objects, such as texts, has no stable bytes.
            digest.write(repr(own.tolist()).encode() if own.dtype.hasobject else own.tobytes())
        return digest.sha256.hexdigest()
    table = as_arrow(frame, source, data.id).combine_chunks()
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(digest, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return digest.sha256.hexdigest()
