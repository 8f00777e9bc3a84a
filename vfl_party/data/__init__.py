"""Reads a party's rows, checks them, and converts them to encoder inputs and targets."""

from vfl_party.data.inputs.features import Features
from vfl_party.data.inputs.labels import Labels
from vfl_party.data.inputs.preprocess import Preprocessor
from vfl_party.data.join import read_table
from vfl_party.data.load import (
    TABLES,
    column_names,
    first_rows,
    load_table,
    make_loader,
    read_rows,
    tabulate,
)
from vfl_party.data.table import Table, describe

__all__ = [
    "TABLES",
    "Features",
    "Labels",
    "Preprocessor",
    "Table",
    "column_names",
    "describe",
    "first_rows",
    "load_table",
    "make_loader",
    "read_rows",
    "read_table",
    "tabulate",
]
