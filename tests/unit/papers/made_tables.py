"""Small files of columns in the exact official formats of data sets."""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_papers.tables import VIEWS

Array = npt.NDArray[Any]
N = 60


def numbers(rows: int, columns: int, seed: int = 0) -> Array:
    """Returns numbers with at most four digits after the point."""
    return np.random.default_rng(seed).normal(size=(rows, columns)).round(4)


def libsvm(values: Array, labels: Array) -> bytes:
    """Returns a libsvm file, without zeros, with a space at the end of lines, as LIBSVM has it."""
    lines = []
    for label, row in zip(labels, values, strict=True):
        cells = "".join(f"{at}:{value:g} " for at, value in enumerate(row, 1) if value)
        lines.append(f"{label} {cells}\n")
    return "".join(lines).encode()


def write_phishing(folder: Path) -> Path:
    values = (numbers(N, 68) > 0).astype(float)
    (folder / "phishing").write_bytes(libsvm(values, np.arange(N) % 2))
    return folder


def write_gisette(folder: Path) -> Path:
    values = numbers(N, 5000) * (numbers(N, 5000, 1) > 1.5)
    labels = np.array(["+1", "-1"] * (N // 2))
    for name, rows in (("gisette_scale.bz2", slice(0, 40)), ("gisette_scale.t.bz2", slice(40, N))):
        (folder / name).write_bytes(bz2.compress(libsvm(values[rows], labels[rows])))
    return folder


def write_covtype(folder: Path) -> Path:
    data = libsvm(numbers(N, 54), np.arange(N) % 2 + 1)
    (folder / "covtype.libsvm.binary.bz2").write_bytes(bz2.compress(data))
    return folder


def zipped(path: Path, members: Mapping[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def csv(names: list[str], rows: list[list[Any]]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in [names, *rows])


def uji(rows: int, seed: int = 0) -> str:
    random = np.random.default_rng(seed)
    names = [f'"WAP{at:03}"' for at in range(1, 521)]
    names += ["LONGITUDE", "LATITUDE", "FLOOR", "BUILDINGID", "SPACEID"]
    names += ["RELATIVEPOSITION", "USERID", "PHONEID", "TIMESTAMP"]
    strengths = np.where(
        random.random((rows, 520)) < 0.9, 100, random.integers(-104, 0, (rows, 520))
    )
    places = np.add(random.normal(size=(rows, 2)), [-7541.2643, 4864920.7782]).round(4)
    rest = random.integers(0, 9, (rows, 7))
    return csv(
        names,
        [
            [*a, *b, *c]
            for a, b, c in zip(strengths.tolist(), places.tolist(), rest.tolist(), strict=True)
        ],
    )


def write_ujiindoorloc(folder: Path) -> Path:
    members = {"trainingData.csv": uji(45), "validationData.csv": uji(15, 1)}
    zipped(
        folder / "ujiindoorloc.zip", {f"UJIndoorLoc/{name}": each for name, each in members.items()}
    )
    return folder


def write_superconduct(folder: Path) -> Path:
    names = ["number_of_elements", *(f"mean_{at}" for at in range(80)), "critical_temp"]
    zipped(
        folder / "superconductivty+data.zip",
        {"train.csv": csv(names, numbers(N, 82).tolist()), "unique_m.csv": "H,He\n0,0\n"},
    )
    return folder


MOVIES = (
    "1::Toy Story (1995)::Animation|Children's|Comedy\n"
    '2::"Great Day, A" (1946)::Film-Noir\n'
    "4::Mis\xe9rables, Les (1998)::Drama|Sci-Fi\n"
)
USERS = "1::F::1::10::48067\n2::M::56::16::70072-1234\n3::M::25::15::55117\n"


def write_movielens(folder: Path) -> Path:
    random = np.random.default_rng(0)
    rows = [
        f"{random.integers(1, 4)}::{random.choice([1, 2, 4])}::{random.integers(1, 6)}::97830{at:04}\n"
        for at in range(N)
    ]
    texts = {"ratings.dat": "".join(rows), "users.dat": USERS, "movies.dat": MOVIES}
    zipped(
        folder / "ml-1m.zip",
        {f"ml-1m/{name}": each.encode("latin-1") for name, each in texts.items()},
    )
    return folder


CONCEPTS = ["sky", "clouds", "person", "water", "animal", "grass", "plants", "lake", "cat", "toy"]


def nuswide(train: int = 50, test: int = 20) -> dict[str, dict[str, str]]:
    """Returns {archive: {member: its text}}; each image shows one concept, and some show 'map',
    too.
    """
    features, tags, truth = {}, {}, {}
    for part, rows, seed in (("Train", train, 0), ("Test", test, 1)):
        random = np.random.default_rng(seed)
        for view, width in VIEWS.items():
            values = numbers(rows, width, seed)
            features[f"Low_Level_Features/{part}_Normalized_{view}.dat"] = "".join(
                " ".join(map(str, row)) + " \n" for row in values.tolist()
            )
        tags[f"NUS_WID_Tags/{part}_Tags1k.dat"] = "".join(
            "".join(f"{cell}\t" for cell in row) + "\n"
            for row in (random.random((rows, 1000)) < 0.01).astype(int).tolist()
        )
        for at, name in enumerate([*CONCEPTS, "map"]):
            shown = [row % 10 == at if at < 10 else row == 7 for row in range(rows)]
            truth[f"Groundtruth/TrainTestLabels/Labels_{name}_{part}.txt"] = "".join(
                f"{int(each)}\n" for each in shown
            )
            # Of all images, which nobody reads twice.
            truth[f"Groundtruth/AllLabels/Labels_{name}.txt"] = "0\n"
    return {"NUS_WID_Low_Level_Features": features, "NUS_WID_Tags": tags, "Groundtruth": truth}


def write_nuswide(folder: Path) -> Path:
    for name, members in nuswide().items():
        zipped(folder / f"{name}.zip", members)
    return folder


def write_nuswide_unpacked(folder: Path) -> Path:
    for name, members in nuswide().items():
        for member, text in members.items():
            path = folder / name / member
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def avazu(rows: int = N) -> str:
    random = np.random.default_rng(0)
    names = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain"
    names += ",app_category,device_id,device_ip,device_model,device_type,device_conn_type"
    names += ",C14,C15,C16,C17,C18,C19,C20,C21"
    made = []
    for row in range(rows):
        row_id, when = 1000009418151094273 + row, 14102100 + row % 24
        words = [f"{each:08x}" for each in random.integers(0, 5, 9)]
        last = random.integers(0, 99, 8).tolist()
        made.append([row_id, row % 2, when, 1005, row % 2, *words, 1, 0, *last])
    return csv(names.split(","), made)


def write_avazu(folder: Path) -> Path:
    (folder / "train.gz").write_bytes(gzip.compress(avazu().encode()))
    return folder


def criteo(rows: int = N) -> str:
    random = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        ints = ["" if each > 90 else str(each) for each in random.integers(-1, 100, 13)]
        words = ["" if each > 6 else f"{each:08x}" for each in random.integers(0, 8, 26)]
        lines.append("\t".join([str(row % 2), *ints, *words]) + "\n")
    return "".join(lines)


def write_criteo(folder: Path) -> Path:
    with tarfile.open(folder / "dac.tar.gz", "w:gz") as archive:
        for name, text in {"readme.txt": "Read me", "train.txt": criteo(), "test.txt": "x"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "phishing": write_phishing,
    "gisette": write_gisette,
    "covtype": write_covtype,
    "ujiindoorloc": write_ujiindoorloc,
    "superconduct": write_superconduct,
    "movielens": write_movielens,
    "nuswide": write_nuswide,
    "nuswide_sky": write_nuswide,
    "avazu": write_avazu,
    "criteo": write_criteo,
}
