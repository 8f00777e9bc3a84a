"""Provisional: recipes of the files that are at hand, until vfl.prepare is merged."""
from __future__ import annotations
from pathlib import Path
from benchmarks import studies
from benchmarks.papers.describe import Tables
from vfl_common.errors import InputError, Code
import numpy as np


def base(name: str, given: Path, own: Path, parties: int, rows: int | None, **options) -> Tables:
    own.mkdir(parents=True, exist_ok=True)
    whole: Tables
    scheme = "columns"
    more = {} if rows is None else {"limit": rows}
    if name == "phishing":
        whole = {"source": str(given / "phishing.csv.gz"), "id": "id", "label": "y"}
    elif name == "ujiindoorloc":
        label = options.get("label", "LONGITUDE")
        whole = {"source": str(studies.write_uji(given, own, label)), "id": "id", "label": label, "scale": "minmax"}
        if label != "place":
            whole["label_scale"] = "minmax"
    elif name == "mnist":
        whole = {"source": str(given / "mnist10k.npz"), "label": "labels"}
        scheme = "quadrants" if parties == 4 else "halves"
    elif name == "cifar10" and "deal" in options:
        return dealt(given, own, parties, rows, options["deal"])
    else:
        raise InputError(Code.FILE_INVALID, f"{name}: its files are not there")
    return {"parties": studies.roster(parties), "rows": {}, "simulate": {"scheme": scheme, "data": whole | more}}


def dealt(given, own, clients, rows, deal):
    from benchmarks.mocosfl import cifar10, dealt as deal_, OWNER
    rows = rows or 50000
    images = cifar10(given, rows, min(rows // 2, 10000), 0, validate=False)
    folder = own / f"cifar-{clients}-{rows}-{deal}"
    folder.mkdir(exist_ok=True)
    parts = deal_(images, clients, deal, 0)
    everything = np.arange(len(images.part))
    images.save(folder / "labels.npz", everything, labels=True, pixels=False)
    data = {"active": {"source": str(folder / "labels.npz"), "label": "label", "id": "id", "split": "part", "columns": []}}
    for number, own_rows in enumerate(parts, 1):
        images.save(folder / f"p{number}.npz", own_rows)
        data[f"passive{number}"] = {"source": str(folder / f"p{number}.npz"), "id": "id", "split": "part", "scale": "minmax"}
    roster = studies.roster(clients + 1)
    roster[0]["features"] = False
    return {"parties": roster, "rows": {"align": "none", "split": "column"}, "simulate": {"parties": data}}
