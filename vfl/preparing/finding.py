"""Finds the official files of a data set in a folder, and compares them with the published ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from vfl.preparing.content import Content
from vfl.preparing.dataset import DataSet, Files, Form, Need
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names


def find(dataset: DataSet, folder: Path) -> tuple[Form, Files]:
    """Returns the first form whose files all lie in the folder, or in a folder directly in it.

    Raises InputError with the names of the missing files and their publisher.
    """
    if not folder.is_dir():
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: no such folder. Give the folder with the files of {dataset.title}.",
        )
    candidates = [(form, _present(form, folder)) for form in dataset.forms]
    for form, files in candidates:
        if not _missing(form, files):
            return form, files
    # The user probably means the most complete form.
    form, files = max(candidates, key=lambda pair: len(pair[1]) / len(pair[0].needs))
    raise InputError(
        Code.FILE_INVALID,
        f"{folder}: {dataset.title} needs "
        f"{list_names([need.name for need in _missing(form, files)])}. Get it from "
        f"{dataset.publisher}.",
    )


def differences(form: Form, files: Files, content: Content) -> list[str]:
    """Returns a sentence for each difference from the published files."""
    notes = [f"These are not the official files: {form.unofficial}."] if form.unofficial else []
    for need in form.needs:
        if need.name in files:
            notes += _file_differences(need, files[need.name])
    splits = [""] * len(content) if content.splits is None else content.splits.tolist()
    counts = Counter(splits)
    for split, rows in form.rows.items():
        if counts[split] != rows:
            what = f"{split} rows" if split else "rows"
            notes.append(f"The files have {counts[split]:,} {what} (published: {rows:,}).")
    return [*notes, *content.differs]


def _present(form: Form, folder: Path) -> dict[str, Path]:
    paths = {need.name: _lies(need, folder) for need in form.needs}
    return {name: path for name, path in paths.items() if path is not None}


def _lies(need: Need, folder: Path) -> Path | None:
    """Returns a file's path: in the folder under one of its names, or in one folder in it."""
    names = (need.name, *need.others)
    here = [path for path in (folder / name for name in names) if _is(need, path)]
    if here:
        return here[0]
    below = [path for name in names for path in sorted(folder.glob(f"*/{name}")) if _is(need, path)]
    if len({path.parent for path in below}) > 1:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: {need.name} is in {list_names([str(path.parent.name) for path in below])}. "
            "Give one of these folders.",
        )
    return below[0] if below else None


def _is(need: Need, path: Path) -> bool:
    return path.is_dir() if need.folder else path.is_file()


def _missing(form: Form, files: Files) -> list[Need]:
    return [need for need in form.needs if not need.optional and need.name not in files]


def _file_differences(need: Need, path: Path) -> list[str]:
    if need.folder or path.name != Path(need.name).name:
        return []
    size = path.stat().st_size
    if need.bytes is not None and size != need.bytes:
        return [f"{path.name} has {size:,} bytes (published: {need.bytes:,})."]
    if need.md5 is not None and _md5(path) != need.md5:
        return [f"{path.name} differs from the published file (its MD5 differs)."]
    return []


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        # MD5 is what the publishers give; it protects nothing.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
