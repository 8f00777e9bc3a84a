"""Finds the finished runs of a library study (``vfl.study``) by a digest of their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.sources import FRAME, is_path
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic

# The file in a run's folder that contains the digest of its inputs.
FILE = "study.json"


class FinishedRuns:
    """The finished runs in a folder. Raises InputError if a file with a digest is damaged."""

    def __init__(self, out: Path) -> None:
        self._folders: dict[str, Path] = {}
        for note in sorted(out.glob(f"*/{FILE}")):
            # Runs without a summary are unfinished, and are repeated.
            if (note.parent / "summary.json").exists():
                self._folders[_read_digest(note)] = note.parent

    def find(self, inputs: str) -> Path | None:
        """Returns the folder of the finished run whose inputs have this digest, or None."""
        return self._folders.get(inputs)

    def note(self, folder: Path, inputs: str) -> None:
        """Writes the digest of its inputs into the folder of a finished run. Raises InputError."""
        write_atomic(folder / FILE, json.dumps({"inputs": inputs}) + "\n")
        self._folders[inputs] = folder


def _read_digest(note: Path) -> str:
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
        Code.FILE_INVALID, f"{note}: is damaged. Restore the file, or remove it to repeat the run."
    )


def compute_inputs_digest(
    recipe: Recipe,
    data: Mapping[str, DataSettings],
    baseline: str | None,
    prints: Fingerprints,
    frames: Mapping[str, Any],
) -> str:
    """Returns a digest of the inputs that determine a run's results: recipe, baseline and rows.

    A file is represented by its size and the time of its last change. The code of a named encoder
    and the rows of a database are not part of the digest. ``frames``: {party: data frame}.
    """
    parts = [
        recipe.canonical_json(),
        str(baseline),
        *(
            f"{name} {settings.model_dump_json()} {prints.compute(settings, frames)}"
            for name, settings in data.items()
        ),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Fingerprints:
    """Computes fingerprints of data sources, and caches them so that each source is read once."""

    def __init__(self) -> None:
        self._cache: dict[str, str] = {}

    def compute(self, data: DataSettings, frames: Mapping[str, Any]) -> str:
        """Returns the fingerprint of a source as text. Equal rows have equal fingerprints."""
        source = data.source
        if source not in self._cache:
            if source.startswith(FRAME):
                name = source.removeprefix(FRAME)
                self._cache[source] = _hash_frame(frames[name], source, data)
            else:
                self._cache[source] = _hash_files(Path(source)) if is_path(source) else ""
        return self._cache[source]


def _hash_files(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    lines = []
    for file in files:
        # A missing file is ignored here: the run that reads it raises the error.
        with contextlib.suppress(OSError):
            stat = file.stat()
            lines.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Digest:
    """A writable file object that computes the SHA-256 digest of the written bytes."""

    closed = False

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _hash_frame(frame: Any, source: str, data: DataSettings) -> str:
    import numpy as np
    import pyarrow

    from vfl_party.data.sources.frames import as_arrow, is_arrays

    digest = _Digest()
    if is_arrays(frame):
        for name, array in frame.items():
            array = np.ascontiguousarray(array)
            digest.write(f"{name} {array.dtype} {array.shape} ".encode())
            # The bytes of an object array are pointers, so its values are hashed as text.
            digest.write(
                repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
            )
        return digest.sha256.hexdigest()
    table = as_arrow(frame, source, data.id).combine_chunks()
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(digest, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return digest.sha256.hexdigest()
