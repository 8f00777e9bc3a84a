"""Gives each party its quarter of scikit-learn's digits, as a file of its own; the bank alone has
the digit.

python make_data.py FOLDER    writes FOLDER/<party>/<party>.npz, and leaves what is there
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

# Top left corner: row, column.
QUARTERS = {"bank": (0, 0), "hospital": (0, 4), "retailer": (4, 0), "telecom": (4, 4)}


def main(folder: Path) -> None:
    digits = load_digits()
    pixels_NHW = (digits.images / 16.0).astype(np.float32)
    ids_N = np.array([f"{number:04d}" for number in range(len(pixels_NHW))])
    for party, (row, column) in QUARTERS.items():
        path = folder / party / f"{party}.npz"
        if path.exists():
            continue
        arrays = {"id": ids_N, "pixels": pixels_NHW[:, row : row + 4, column : column + 4]}
        if party == "bank":
            arrays["digit"] = digits.target
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name("new.npz")
        np.savez_compressed(new, **arrays)
        # Whole or not at all.
        new.replace(path)
        print(f"{path}: {len(ids_N)} rows of {', '.join(arrays)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
