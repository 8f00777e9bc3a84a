"""Finds a data set's files in a folder, and compares them with the published sizes and digests."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from vfl.preparing.content import Content
from vfl.preparing.dataset import DataSet, Files, Form, Need
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names


def find_files(dataset: DataSet, folder: Path) -> tuple[Form, Files]:
    """Returns the first form whose files are all in the folder or in its direct subfolders.

    Raises InputError with the names of the missing files and their publisher.
    """
    if not folder.is_dir():
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: no such folder. Give the folder with the files of {dataset.title}.",
        )
    candidates = [(form, _find_present(form, folder)) for form in dataset.forms]
    for form, files in candidates:
        if not _list_missing(form, files):
            return form, files
    # The error is about the most complete form, which the user probably means.
    form, files = max(candidates, key=lambda pair: len(pair[1]) / len(pair[0].needs))
    raise InputError(
        Code.FILE_INVALID,
        f"{folder}: {dataset.title} needs "
        f"{list_names([need.name for need in _list_missing(form, files)])}. Download from "
        f"{dataset.publisher}.",
    )


def list_differences(form: Form, files: Files, content: Content) -> list[str]:
    """Returns a sentence for each difference between the files found and the published files."""
    notes = [f"These are not the official files: {form.unofficial}."] if form.unofficial else []
    for need in form.needs:
        if need.name in files:
            notes += _compare_file(need, files[need.name])
    splits = [""] * len(content) if content.splits is None else content.splits.tolist()
    counts = Counter(splits)
    for split, rows in form.rows.items():
        if counts[split] != rows:
            what = f"{split} rows" if split else "rows"
            notes.append(f"The files have {counts[split]:,} {what} (published: {rows:,}).")
    return [*notes, *content.differs]


def _find_present(form: Form, folder: Path) -> dict[str, Path]:
    paths = {need.name: _find_path(need, folder) for need in form.needs}
    return {name: path for name, path in paths.items() if path is not None}


def _find_path(need: Need, folder: Path) -> Path | None:
    """Finds a file by one of its names, in the folder or otherwise in one of its subfolders."""
    names = (need.name, *need.others)
    direct = [path for path in (folder / name for name in names) if _has_kind(need, path)]
    if direct:
        return direct[0]
    nested = [
        path for name in names for path in sorted(folder.glob(f"*/{name}")) if _has_kind(need, path)
    ]
    if len({path.parent for path in nested}) > 1:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: {need.name} is in {list_names([path.parent.name for path in nested])}. "
            "Give one of these folders.",
        )
    return nested[0] if nested else None


def _has_kind(need: Need, path: Path) -> bool:
    return path.is_dir() if need.folder else path.is_file()


def _list_missing(form: Form, files: Files) -> list[Need]:
    return [need for need in form.needs if not need.optional and need.name not in files]


def _compare_file(need: Need, path: Path) -> list[str]:
    if need.folder or path.name != Path(need.name).name:
        return []
    size = path.stat().st_size
    if need.bytes is not None and size != need.bytes:
        return [f"{path.name} has {size:,} bytes (published: {need.bytes:,})."]
    if need.md5 is not None and _compute_md5(path) != need.md5:
        return [f"{path.name} differs from the published file (its MD5 differs)."]
    return []


def _compute_md5(path: Path) -> str:
    with path.open("rb") as file:
        # MD5 only detects differences here, because the publishers give no other digest.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
