"""Forest cover type (Blackard and Dean 1999), of LIBSVM with two classes."""

from __future__ import annotations

from vfl_papers import recipes
from vfl_papers.columns.libsvm_set import libsvm_set
from vfl_papers.dataset import DataSet, Need, PaperUse

# The values of Tables 2 and 5.
_FEDONCE = recipes.fedonce(
    {"kind": "mlp", "hidden": [200, 100, 100]},
    [30, 30],
    (1e-3, 1e-5, 100, 30),
    (1e-3, 1e-3, 100, 100),
)
_NAME = "covtype.libsvm.binary"
_SILENT = (
    "The paper does not say whether it takes the file whose columns are scaled, nor which rows are "
    "for validation; it tunes by five folds. Each party scales its columns anyway."
)

DATASET: DataSet = libsvm_set(
    "Covertype",
    {"": Need(f"{_NAME}.bz2", (_NAME, f"{_NAME}.scale.bz2", f"{_NAME}.scale"))},
    {"": 581_012},
    54,
    {1.0: "1", 2.0: "2"},
    PaperUse("FedOnce", "Tables 4, 5, 6; Figs. 5, 6", "columns", 10, _FEDONCE, silent=_SILENT),
    memory="about 400 MB",
)
