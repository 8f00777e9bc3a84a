"""Avazu (Kaggle 2014): ten days of advertisements on telephones."""

from __future__ import annotations

from vfl_papers.columns.clicks import FEDHSSL, OPTIONS, draw_rows, halves
from vfl_papers.columns.official import FLOAT, WORD, ColumnFiles, file
from vfl_papers.dataset import Content, DataSet, Files, Form, Need, PaperUse, Request

_FILE, _ROWS = "train.gz", 40_428_967
_CATEGORIES = (
    "hour",
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
)
_NUMBERS = tuple(f"C{number}" for number in range(14, 22))
_SILENT = (
    "The paper counts 14 categories and 8 numbers, and does not name them. Here the columns C14 to "
    "C21 are the numbers. It does not say in which order they are divided, nor how wide its two "
    "layers are."
)


def _read(files: Files, request: Request) -> Content:
    types = dict.fromkeys(_CATEGORIES, WORD) | dict.fromkeys(_NUMBERS, FLOAT)
    source = file(files[_FILE], format="text", separator=",")
    return draw_rows(ColumnFiles((source,), types), "click", _ROWS, request)


DATASET = DataSet(
    title="Avazu",
    publisher="Kaggle (https://www.kaggle.com/c/avazu-ctr-prediction/data)",
    holds="14 categories and 8 numbers of an advertisement",
    rows=_ROWS,
    task={"kind": "binary"},
    forms=(Form((Need(_FILE, ("train.csv", "train", "train.csv.gz")),), _read),),
    divisions={"halves": halves(_CATEGORIES, _NUMBERS)},
    uses=(
        PaperUse(
            "FedHSSL",
            "Tables IV-VII, IX-XII; Figs. 5-8",
            "halves",
            2,
            FEDHSSL,
            silent=_SILENT,
        ),
    ),
    memory="about 2 GB",
    options=OPTIONS,
)
