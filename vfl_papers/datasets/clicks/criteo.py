"""Criteo (Kaggle 2014): seven days of advertisements in browsers."""

from __future__ import annotations

from vfl_papers.columns.clicks import FEDHSSL, OPTIONS, draw_rows, halves
from vfl_papers.columns.official import FLOAT, WORD, ColumnFiles, FileTree, file
from vfl_papers.dataset import Content, DataSet, Files, Form, Need, PaperUse, Request

_ARCHIVE, _FILE, _ROWS = "dac.tar.gz", "train.txt", 45_840_617
_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
_CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
_SILENT = (
    "No paper here uses Criteo. It is drawn and divided as FedHSSL does it with Avazu; a number "
    "that is missing becomes 0."
)


def _read_archive(files: Files, request: Request) -> Content:
    return _read(FileTree(files[_ARCHIVE]).source(_FILE), request)


def _read_file(files: Files, request: Request) -> Content:
    return _read(str(files[_FILE]), request)


def _read(source: str, request: Request) -> Content:
    types = dict.fromkeys(_NUMBERS, FLOAT) | dict.fromkeys(_CATEGORIES, WORD)
    layout = file(source, format="text", separator="\t", names=("click", *types))
    return draw_rows(ColumnFiles((layout,), types, missing=True), "click", _ROWS, request)


_HALVES = halves(_CATEGORIES, _NUMBERS, missing="zero")

DATASET = DataSet(
    title="Criteo",
    publisher="Criteo (https://www.kaggle.com/c/criteo-display-ad-challenge, dac.tar.gz)",
    holds="13 numbers and 26 categories of an advertisement",
    rows=_ROWS,
    task={"kind": "binary"},
    forms=(
        Form(
            (Need(_ARCHIVE, ("kaggle-display-advertising-challenge-dataset.tar.gz",)),),
            _read_archive,
        ),
        Form((Need(_FILE),), _read_file),
    ),
    divisions={"halves": _HALVES},
    uses=(PaperUse("FedHSSL", "its recipe for Avazu", "halves", 2, FEDHSSL, silent=_SILENT),),
    memory="about 2 GB",
    options=OPTIONS,
)
