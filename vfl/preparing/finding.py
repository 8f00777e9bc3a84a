"""Finds the official files of a data set in a folder, and compares them with what is published."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from vfl.preparing.content import Content
from vfl.preparing.dataset import DataSet, Files, Form, Need
from vfl_common.errors import Code, InputError
from vfl_common.text import listed


def find(dataset: DataSet, folder: Path) -> tuple[Form, Files]:
    """Returns the first form whose files all lie in the folder, or in a folder directly in it.

    Raises InputError that says which files are missing, and who publishes them.
    """
    if not folder.is_dir():
        text = f"{folder}: no such folder; give the folder with the files of {dataset.title}"
        raise InputError(Code.FILE_INVALID, text)
    found = [(form, _present(form, folder)) for form in dataset.forms]
    for form, files in found:
        if not _missing(form, files):
            return form, files
    # The form of which most is there is the one that the person means.
    form, files = max(found, key=lambda each: len(each[1]) / len(each[0].needs))
    names = listed([each.name for each in _missing(form, files)])
    text = f"{folder}: {dataset.title} needs {names}, which is not there"
    raise InputError(Code.FILE_INVALID, f"{text}; get it from {dataset.publisher}")


def differences(form: Form, files: Files, content: Content) -> list[str]:
    """Returns a sentence for each difference from the files that the makers publish."""
    found = [f"These are not the official files: {form.unofficial}."] if form.unofficial else []
    for need in form.needs:
        if need.name in files:
            found += _file_differences(need, files[need.name])
    splits = [""] * len(content) if content.splits is None else content.splits.tolist()
    counts = Counter(splits)
    for split, rows in form.rows.items():
        if counts[split] != rows:
            what = f"{split} rows" if split else "rows"
            found.append(f"{counts[split]:,} {what} were found, and {rows:,} are published.")
    return [*found, *content.differs]


def _present(form: Form, folder: Path) -> dict[str, Path]:
    found = {need.name: _lies(need, folder) for need in form.needs}
    return {name: path for name, path in found.items() if path is not None}


def _lies(need: Need, folder: Path) -> Path | None:
    """Returns where a file lies: in the folder under one of its names, or in one folder in it."""
    names = (need.name, *need.others)
    here = [path for path in (folder / name for name in names) if _is(need, path)]
    if here:
        return here[0]
    below = [path for name in names for path in sorted(folder.glob(f"*/{name}")) if _is(need, path)]
    if len({path.parent for path in below}) > 1:
        text = f"{folder}: {need.name} is in {listed([str(path.parent.name) for path in below])}"
        raise InputError(Code.FILE_INVALID, f"{text}; give one of these folders")
    return below[0] if below else None


def _is(need: Need, path: Path) -> bool:
    return path.is_dir() if need.folder else path.is_file()


def _missing(form: Form, files: Files) -> list[Need]:
    return [each for each in form.needs if not each.optional and each.name not in files]


def _file_differences(need: Need, path: Path) -> list[str]:
    if need.folder or path.name != Path(need.name).name:
        return []
    size = path.stat().st_size
    if need.bytes is not None and size != need.bytes:
        return [f"{path.name} has {size:,} bytes, and {need.bytes:,} are published."]
    if need.md5 is not None and _md5(path) != need.md5:
        return [f"{path.name} has another content than the published file (its MD5 differs)."]
    return []


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        # Makers publish it; nothing is trusted for it.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
