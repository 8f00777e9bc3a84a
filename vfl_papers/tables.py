"""The data sets of the papers whose rows are numbers and categories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.errors import Code, InputError
from vfl_papers import dividing
from vfl_papers.columns import (
    BYTE,
    FLOAT,
    WORD,
    ColumnFiles,
    FileTree,
    Types,
    file,
    join_columns,
    row_count_note,
    select_rows,
)
from vfl_papers.dataset import (
    BLOCK_ROWS,
    TEST,
    TRAIN,
    Array,
    Block,
    Content,
    ContentPart,
    DataSet,
    Division,
    Files,
    Form,
    Need,
    PaperUse,
    Request,
    Rows,
    damage_error,
)
from vfl_papers.dividing import ALPHA, COLUMNS, IMPORTANCE, make_parts, pick_columns
from vfl_party.base.seeds import derive_seed, draw_permutation

_FEDHSSL_TABLES = "Tables IV-VII, IX-XII; Figs. 5-8"
# Learning rate, weight decay, batch size and epochs (see ``recipes.fedonce``).
_Numbers = tuple[float, float, int, int]


def _fedonce_mlp(
    hidden: Sequence[int], top: Sequence[int], guest: _Numbers, host: _Numbers, d: int = 3
) -> Mapping[str, Any]:
    """Returns the recipe of FedOnce with the values of Tables 2 and 5."""
    return dividing.fedonce({"kind": "mlp", "hidden": list(hidden)}, top, guest, host, d=d)


def _columns_use(
    where: str, recipe: Mapping[str, Any], silent: str, validation: float = 0.0
) -> PaperUse:
    """Returns FedOnce's use of ranges of columns at ten parties."""
    return PaperUse("FedOnce", where, "columns", 10, recipe, validation=validation, silent=silent)


# -- Files of the LIBSVM collection (Chang and Lin): two classes, columns ``f1``, ``f2``, …


def _libsvm_set(
    title: str,
    files: Mapping[str, tuple[Need, int]],
    width: int,
    classes: Mapping[float, str],
    use: PaperUse,
    memory: str,
    *other_forms: Form,
) -> DataSet:
    """Returns a data set of libsvm files.

    Args:
        title: The name of the data set.
        files: {split: (its file, the published number of rows)}; the split is ``""`` if there is
            only one.
        width: The number of feature columns.
        classes: {label in the files: name of the class}, in the order of the class numbers.
        use: The paper's use of the data set.
        memory: The memory that ``vfl prepare`` needs, as text.
        other_forms: Forms that are not official.
    """
    needs = {split: need for split, (need, _) in files.items()}
    rows = {split: count for split, (_, count) in files.items()}
    read = partial(
        _read_libsvm, {split: need.name for split, need in needs.items()}, width, classes
    )
    return DataSet(
        title=title,
        publisher="LIBSVM Data "
        "(https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html), under these names",
        holds=f"{width:,} numbers",
        rows=sum(rows.values()),
        task={"kind": "binary"},
        forms=(Form(tuple(needs.values()), read, rows), *other_forms),
        divisions={"columns": COLUMNS, "importance": IMPORTANCE},
        uses=(use,),
        memory=memory,
        options=ALPHA,
    )


def _read_libsvm(
    names: Mapping[str, str], width: int, classes: Mapping[float, str], files: Files, _: Request
) -> Content:
    sources = tuple(file(files[name], format="libsvm", names=width) for name in names.values())
    columns = ColumnFiles(sources, dict.fromkeys([f"f{at}" for at in range(1, width + 1)], FLOAT))
    labels_by_file = columns.of({"label": pa.float64()}).by_file("label")
    values = np.concatenate(labels_by_file)
    labels = np.full(len(values), -1, np.int64)
    for number, value in enumerate(classes):
        labels[values == value] = number
    if (labels < 0).any():
        known = " and ".join(f"{value:g}" for value in classes)
        wrong = values[labels < 0][0]
        raise damage_error(
            sources[0].source, f"has the label {wrong:g}, and its labels are {known}"
        )
    lengths = [len(part) for part in labels_by_file]
    splits = np.repeat(np.array([*names], object), lengths) if len(names) > 1 else None
    return Content(labels, splits, columns.blocks, classes=tuple(classes.values()))


def _read_phishing_csv(files: Files, _: Request) -> Content:
    """Reads a CSV file with the columns ``f0`` to ``f67`` and ``y``, named ``f1`` to ``f68`` as
    in the official file.
    """
    source = file(files["phishing.csv.gz"])
    columns = ColumnFiles((source,), {f"f{at}": FLOAT for at in range(68)})
    labels = columns.of({"y": pa.int64()}).array("y").astype(np.int64)
    names = [f"f{at}" for at in range(1, 69)]

    def blocks(rows: Rows) -> Iterator[Block]:
        for block in columns.blocks(rows):
            yield block.rename_columns(names)

    return Content(labels, None, blocks, classes=("legitimate", "phishing"))


# Forest cover type (Blackard and Dean 1999) has two classes in LIBSVM.
_COVTYPE_FILE = "covtype.libsvm.binary"


# -- Superconductivty Data (Hamidieh 2018): the critical temperature of superconductors

_CRITICAL, _SUPER_TABLE, _SUPER_ZIP = "critical_temp", "train.csv", "superconductivty+data.zip"


def _read_superconduct(name: str, files: Files, _: Request) -> Content:
    from vfl_party.data import column_names

    path = files[name]
    source = file(path if name == _SUPER_TABLE else FileTree(path).source(_SUPER_TABLE))
    names = column_names(source)
    types = {name: FLOAT for name in names if name != _CRITICAL}
    if len(types) != 81 or _CRITICAL not in names:
        raise damage_error(source.source, f"must have 81 columns and {_CRITICAL!r}")
    columns = ColumnFiles((source,), types)
    return Content(columns.of({_CRITICAL: pa.float64()}).array(_CRITICAL), None, columns.blocks)


# -- UJIIndoorLoc (Torres-Sospedra et al. 2014): the place of a person, from the strengths of Wi-Fi

_UJI_FILES = ("trainingData.csv", "validationData.csv")
_UJI_ZIP, _UJI_PARQUET = "ujiindoorloc.zip", "ujiindoorloc.parquet"
_UJI_ROWS = 21_048


def _read_uji_zip(files: Files, request: Request) -> Content:
    tree = FileTree(files[_UJI_ZIP])
    return _read_uji([tree.source(name) for name in _UJI_FILES], request)


def _read_uji_parquet(files: Files, request: Request) -> Content:
    source = str(files[_UJI_PARQUET])
    parts = ColumnFiles((file(source),), {"part": WORD}).array("part")
    test = parts == "validation"
    if not (test | (parts == "train")).all():
        raise damage_error(
            source, "has values other than train and validation in the column 'part'"
        )
    return _read_uji([source], request, np.where(test, TEST, TRAIN).astype(object))


def _read_uji(sources: Sequence[str], request: Request, splits: Array | None = None) -> Content:
    label, split = request.options["label"], request.options["split"]
    for key, value, known in (
        ("label", label, ("LONGITUDE", "LATITUDE")),
        ("split", split, ("random", "makers")),
    ):
        if value not in known:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: unknown value {value!r}. Choose {' or '.join(known)}.",
            )
    points = [f"WAP{number:03}" for number in range(1, 521)]
    columns = ColumnFiles(tuple(map(file, sources)), dict.fromkeys(points, FLOAT))
    labels_by_file = columns.of({label: pa.float64()}).by_file(label)
    if splits is None:
        lengths = [len(part) for part in labels_by_file]
        splits = np.repeat(np.array([TRAIN, TEST], object), lengths)
    labels = np.concatenate(labels_by_file)
    return Content(
        labels,
        splits if split == "makers" else None,
        columns.blocks,
        differs=row_count_note(len(labels), _UJI_ROWS),
    )


# -- MovieLens 1M (Harper and Konstan 2015): 1,000,209 ratings of movies by users

_RATINGS = 1_000_209
_IDENTITIES = ("user", "movie")
_AUXILIARY = ("gender", "age", "occupation")
_GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War",
    "Western",
)  # fmt: skip
_YEAR = re.compile(r"\((\d{4})\)\s*$")
_NUMBER = pa.int32()
# The encoders of the party with the identities, and of the other party.
_NCF, _OTHER = ({"kind": "tabular", "hidden": hidden} for hidden in ([32, 16], [128]))


def _read_movielens(need: str, files: Files, _: Request) -> Content:
    """Joins each rating with the columns of its user and its movie. All of it is in memory."""
    tree = FileTree(files[need])
    names = (*_IDENTITIES, "rating", "time")
    ratings = _movielens_table(tree, "ratings.dat", dict.fromkeys(names, _NUMBER))
    source = ratings.files[0].source
    columns = {name: ratings.array(name) for name in (*_IDENTITIES, "rating")}
    user_types = {"user": _NUMBER, "gender": WORD, "age": WORD, "occupation": WORD, "zip": WORD}
    users = _movielens_table(tree, "users.dat", user_types)
    movies = _movielens_table(tree, "movies.dat", {"movie": _NUMBER, "title": WORD, "genres": WORD})
    places = {
        name: _look_up(source, name, table.array(name), columns[name])
        for name, table in (("user", users), ("movie", movies))
    }
    tables = {
        "user": pa.table({name: users.array(name) for name in _AUXILIARY}),
        "movie": _describe_movies(movies),
    }

    def blocks(rows: Rows) -> Iterator[Block]:
        for start in range(0, len(rows), BLOCK_ROWS):
            own = rows[start : start + BLOCK_ROWS]
            features = {name: columns[name][own].astype(str) for name in _IDENTITIES}
            for name, table in tables.items():
                taken = table.take(pa.array(places[name][own]))
                features |= {column: taken.column(column) for column in taken.column_names}
            yield pa.table(features)

    note = row_count_note(len(columns["rating"]), _RATINGS)
    return Content(columns["rating"].astype(np.float64), None, blocks, differs=note)


def _movielens_table(tree: FileTree, name: str, types: Types) -> ColumnFiles:
    """Returns a file of the data set, in Latin-1."""
    layout = {"format": "text", "separator": "::", "encoding": "latin-1", "names": tuple(types)}
    return ColumnFiles((file(tree.source(name), **layout),), types)


def _look_up(source: str, name: str, known: Array, wanted: Array) -> Array:
    """Returns the position in ``known`` of each value of ``wanted``, [N]. Raises InputError for an
    unknown value.
    """
    order = np.argsort(known, kind="stable")
    indices = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
    places: Array = order[indices]
    wrong = known[places] != wanted
    if wrong.any():
        row = int(wrong.argmax()) + 1
        raise damage_error(source, f"row {row:,} has a {name} that {name}s.dat does not list")
    return places


def _describe_movies(movies: ColumnFiles) -> pa.Table:
    """Returns the year of each movie, and a column of 0 and 1 for each genre. Raises InputError."""
    years, genres_of = [], []
    texts = (movies.array(name).tolist() for name in ("title", "genres"))
    for row, (title, words) in enumerate(zip(*texts, strict=True), 1):
        year, genres = _YEAR.search(title), set(words.split("|"))
        if year is None or not genres <= {*_GENRES}:
            raise damage_error(
                movies.files[0].source, f"row {row:,} has no year, or an unknown genre"
            )
        years.append(int(year[1]))
        genres_of.append(genres)
    columns = {
        f"genre_{name}": np.array([name in genres for genres in genres_of], np.uint8)
        for name in _GENRES
    }
    return pa.table({"year": np.array(years, np.int32), **columns})


def _make_source_parts(_: Content, request: Request) -> Sequence[ContentPart]:
    names = (*_AUXILIARY, "year", *(f"genre_{name}" for name in _GENRES))
    parts = make_parts(request, [pick_columns(_IDENTITIES), pick_columns(names)])
    return [replace(part, encoder=_NCF if part.name == "party-1" else _OTHER) for part in parts]


# -- NUS-WIDE (Chua et al. 2009): low-level features, tags and concepts of 269,648 images of Flickr.
# -- Features are numbers in ``.dat`` files, with a line for each image. Tags are 0 and 1. Each
# -- concept has its own files of 0 and 1. The images of training come first.

_FEATURES, _TAGS, _TRUTH = "NUS_WID_Low_Level_Features", "NUS_WID_Tags", "Groundtruth"
_NUS_PUBLISHER = (
    "the National University of Singapore, LMS (search for NUS-WIDE), as three zip files of these "
    "names"
)
# {kind of feature: number of columns}: colour histogram, moments, correlogram, edges, wavelets.
VIEWS = {"CH": 64, "CM55": 225, "CORR": 144, "EDH": 73, "WT": 128}
_TAG_COLUMNS = [f"tag{at}" for at in range(1, 1001)]
_NUS_ROWS = {TRAIN: 161_789, TEST: 107_859}
_NUS_PARTS = {TRAIN: "Train", TEST: "Test"}
_CONCEPTS = 10


def _nuswide_forms(
    names: Sequence[str], read: Any, rows: Mapping[str, int] | None = None
) -> tuple[Form, ...]:
    """Returns two forms: the published zip files, and their folders."""
    zips = tuple(Need(f"{name}.zip") for name in names)
    folders = tuple(Need(name, folder=True) for name in names)
    return tuple(Form(needs, read, rows or {}) for needs in (zips, folders))


def _columns_of_view(view: str) -> list[str]:
    """Returns the columns of a kind of feature: ``ch1``, ``ch2`` and so on."""
    return [f"{view.lower()}{at}" for at in range(1, VIEWS[view] + 1)]


def _nuswide_columns(
    tree: FileTree, files: str, names: Sequence[str], kind: pa.DataType
) -> ColumnFiles:
    """Returns a training file and a test file, in whose name ``{}`` stands for the part."""
    layout = {"format": "text", "separator": "whitespace", "names": tuple(names)}
    sources = tuple(file(tree.source(files.format(part)), **layout) for part in _NUS_PARTS.values())
    return ColumnFiles(sources, dict.fromkeys(names, kind))


def _read_concept(truth: FileTree, name: str) -> list[Array]:
    """Returns whether each image shows a concept, [N] of each part. Raises InputError."""
    return _nuswide_columns(truth, f"Labels_{name}_{{}}.txt", ["shown"], BYTE).by_file("shown")


def _rank_concepts(truth: FileTree) -> list[str]:
    """Returns all concepts, the one with the most images first. Raises InputError."""
    matches = (re.fullmatch(r"Labels_(.*)_Train\.txt", Path(name).name) for name in truth.names)
    names = [match[1] for match in matches if match is not None]
    if not names:
        raise damage_error(str(truth.path), "holds no files Labels_…_Train.txt")
    counts = {name: sum(int(part.sum()) for part in _read_concept(truth, name)) for name in names}
    return sorted(names, key=lambda name: (-counts[name], name))


def _read_concepts(truth: FileTree, names: Sequence[str]) -> tuple[npt.NDArray[np.bool_], Array]:
    """Returns whether each image shows each concept, [N, C], and the splits, [N]. Raises
    InputError.
    """
    parts = [_read_concept(truth, name) for name in names]
    if len({tuple(map(len, part)) for part in parts}) > 1:
        raise damage_error(str(truth.path), "has files with different numbers of rows")
    splits = np.repeat(np.array([*_NUS_PARTS], object), [*map(len, parts[0])])
    return np.stack([np.concatenate(part) for part in parts], axis=1) > 0, splits


def _blocks_of_features(
    features: Path, tags: Path | None = None
) -> Callable[[Rows], Iterator[Block]]:
    """Returns a function that yields blocks of the low-level features, and of the tags if ``tags``
    is given. Raises InputError.
    """
    tree = FileTree(features)
    tables = [
        _nuswide_columns(tree, f"{{}}_Normalized_{view}.dat", _columns_of_view(view), FLOAT)
        for view in VIEWS
    ]
    if tags is not None:
        tables.append(_nuswide_columns(FileTree(tags), "{}_Tags1k.dat", _TAG_COLUMNS, BYTE))

    def blocks(rows: Rows) -> Iterator[Block]:
        whole = join_columns([table.batches() for table in tables], str(features))
        yield from select_rows(whole, rows, str(features))

    return blocks


def _read_nuswide(files: Files, _: Request) -> Content:
    features, tags, truth = files.values()
    tree = FileTree(truth)
    names = _rank_concepts(tree)
    if len(names) < _CONCEPTS:
        raise damage_error(
            str(truth), f"must hold at least {_CONCEPTS} concepts (got {len(names)})"
        )
    names = names[:_CONCEPTS]
    shown_NC, splits = _read_concepts(tree, names)
    rows = np.flatnonzero(shown_NC.sum(axis=1) == 1)
    blocks = _blocks_of_features(features, tags)
    return Content(
        shown_NC[rows].argmax(axis=1),
        splits[rows],
        lambda own: blocks(rows[own]),
        ids=np.char.zfill(rows.astype("S6"), 6),
        classes=tuple(names),
        differs=row_count_note(len(shown_NC), sum(_NUS_ROWS.values())),
    )


def _make_modality_parts(_: Content, request: Request) -> Sequence[ContentPart]:
    features = [name for view in VIEWS for name in _columns_of_view(view)]
    return make_parts(request, [pick_columns(features), pick_columns(_TAG_COLUMNS)])


def _read_sky(files: Files, _: Request) -> Content:
    features, truth = files.values()
    shown_NC, splits = _read_concepts(FileTree(truth), ["sky"])
    labels = shown_NC[:, 0].astype(np.int64)
    return Content(labels, splits, _blocks_of_features(features), classes=("no sky", "sky"))


def _make_view_parts(_: Content, request: Request) -> Sequence[ContentPart]:
    return make_parts(request, [pick_columns(_columns_of_view(view)) for view in VIEWS])


# -- Logs of advertisements: Avazu and Criteo (Kaggle 2014). A sample of the rows is taken.

_CLICK_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "train": (100_000, "Rows drawn at random for training."),
    "test": (20_000, "Rows drawn at random for testing."),
    "buckets": (
        0,
        "If greater than 0, the buckets into which each column of categories is hashed; needed for "
        "a column of more than 1,048,576 categories.",
    ),
}


def _draw_clicks(table: ColumnFiles, published: int, request: Request) -> Content:
    """Reads the label of every row, and draws rows for training and testing. Raises InputError if
    there are fewer.
    """
    clicks = table.of({"click": pa.int8()}).array("click")
    wrong = (clicks != 0) & (clicks != 1)
    if wrong.any():
        row = int(wrong.argmax()) + 1
        raise damage_error(table.files[0].source, f"row {row:,} has a label that is not 0 or 1")
    train, test = (request.options[key] for key in (TRAIN, TEST))
    are_valid = all(type(number) is int and number > 0 for number in (train, test))
    if not are_valid or train + test > len(clicks):
        raise InputError(
            Code.CONFIG_INVALID,
            f"train, test: must be positive integers whose sum is at most {len(clicks):,} (got "
            f"{train!r} and {test!r}). Give smaller numbers.",
        )
    order = draw_permutation(derive_seed(request.seed, "prepare", "clicks"), len(clicks))
    splits = np.repeat(np.array([TRAIN, TEST], object), [train, test])
    rows = order[: train + test]
    by_row = np.argsort(rows, kind="stable")
    rows = rows[by_row]
    return Content(
        clicks[rows].astype(np.int64),
        splits[by_row],
        lambda own: table.blocks(rows[own]),
        classes=("no click", "click"),
        differs=row_count_note(len(clicks), published),
    )


def _make_share_parts(
    categories: Sequence[str],
    numbers: Sequence[str],
    data: Mapping[str, Any],
    _: Content,
    request: Request,
) -> Sequence[ContentPart]:
    """Gives every party the same number of columns of both kinds.

    ``data``: Keys of every party's ``[data]``.
    """
    k, buckets = request.parties, request.options["buckets"]
    max_parties = min(len(categories), len(numbers))
    if not 0 < k <= max_parties or type(buckets) is not int:
        raise InputError(
            Code.CONFIG_INVALID,
            f"parties, buckets: must be 1 to {max_parties} parties, and an integer number "
            f"of buckets (got {k} and {buckets!r}). Correct them.",
        )
    shares = zip(np.array_split(categories, k), np.array_split(numbers, k), strict=True)
    picks = [pick_columns([str(name) for part in share for name in part]) for share in shares]
    settings = {**data, **({"categorical_buckets": buckets} if buckets > 0 else {})}
    parts = make_parts(request, picks)
    return [replace(part, settings={**part.settings, **settings}) for part in parts]


# An embedding of a category has 32 numbers (FedHSSL, Appendix A).
_CLICK_ENCODER = {"kind": "tabular", "hidden": [128], "category_size": 32}
_CLICK_RECIPE = dividing.fedhssl(_CLICK_ENCODER, 128, batch_size=512)

_AVAZU_FILE, _AVAZU_ROWS = "train.gz", 40_428_967
_AVAZU_CATEGORIES = (
    "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
)  # fmt: skip
_AVAZU_NUMBERS = tuple(f"C{number}" for number in range(14, 22))


def _read_avazu(files: Files, request: Request) -> Content:
    types = dict.fromkeys(_AVAZU_CATEGORIES, WORD) | dict.fromkeys(_AVAZU_NUMBERS, FLOAT)
    source = file(files[_AVAZU_FILE], format="text", separator=",")
    return _draw_clicks(ColumnFiles((source,), types), _AVAZU_ROWS, request)


_CRITEO_ARCHIVE, _CRITEO_FILE, _CRITEO_ROWS = "dac.tar.gz", "train.txt", 45_840_617
_CRITEO_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
_CRITEO_CATEGORIES = tuple(f"C{number}" for number in range(1, 27))


def _read_criteo(name: str, files: Files, request: Request) -> Content:
    path = files[name]
    source = str(path) if name == _CRITEO_FILE else FileTree(path).source(_CRITEO_FILE)
    types = dict.fromkeys(_CRITEO_NUMBERS, FLOAT) | dict.fromkeys(_CRITEO_CATEGORIES, WORD)
    layout = file(source, format="text", separator="\t", names=("click", *types))
    return _draw_clicks(ColumnFiles((layout,), types, missing=True), _CRITEO_ROWS, request)


# {name: data set}
DATASETS: Mapping[str, DataSet] = {
    "avazu": DataSet(
        title="Avazu",
        publisher="Kaggle (https://www.kaggle.com/c/avazu-ctr-prediction/data)",
        holds="14 categories and 8 numbers of an advertisement",
        rows=_AVAZU_ROWS,
        task={"kind": "binary"},
        forms=(Form((Need(_AVAZU_FILE, ("train.csv", "train", "train.csv.gz")),), _read_avazu),),
        divisions={
            "halves": Division(
                "the same share of the categories and of the numbers",
                partial(_make_share_parts, _AVAZU_CATEGORIES, _AVAZU_NUMBERS, {}),
            )
        },
        uses=(
            PaperUse(
                "FedHSSL",
                _FEDHSSL_TABLES,
                "halves",
                2,
                _CLICK_RECIPE,
                silent="The paper counts 14 categories and 8 numbers, and does not name them. "
                "Here the columns C14 to C21 are the numbers. It does not say in which order they "
                "are divided, nor how wide its two layers are.",
            ),
        ),
        memory="about 2 GB",
        options=_CLICK_OPTIONS,
    ),
    "covtype": _libsvm_set(
        "Covertype",
        {
            "": (
                Need(
                    f"{_COVTYPE_FILE}.bz2",
                    (_COVTYPE_FILE, f"{_COVTYPE_FILE}.scale.bz2", f"{_COVTYPE_FILE}.scale"),
                ),
                581_012,
            )
        },
        54,
        {1.0: "1", 2.0: "2"},
        _columns_use(
            "Tables 4, 5, 6; Figs. 5, 6",
            _fedonce_mlp([200, 100, 100], [30, 30], (1e-3, 1e-5, 100, 30), (1e-3, 1e-3, 100, 100)),
            "The paper does not say whether it takes the file whose columns are scaled, nor which "
            "rows are for validation; it tunes by five folds. Each party scales its columns "
            "anyway.",
        ),
        "about 400 MB",
    ),
    "criteo": DataSet(
        title="Criteo",
        publisher="Criteo (https://www.kaggle.com/c/criteo-display-ad-challenge, dac.tar.gz)",
        holds="13 numbers and 26 categories of an advertisement",
        rows=_CRITEO_ROWS,
        task={"kind": "binary"},
        forms=tuple(
            Form((need,), partial(_read_criteo, need.name))
            for need in (
                Need(_CRITEO_ARCHIVE, ("kaggle-display-advertising-challenge-dataset.tar.gz",)),
                Need(_CRITEO_FILE),
            )
        ),
        divisions={
            "halves": Division(
                "the same share of the categories and of the numbers",
                partial(
                    _make_share_parts, _CRITEO_CATEGORIES, _CRITEO_NUMBERS, {"missing": "zero"}
                ),
            )
        },
        uses=(
            PaperUse(
                "FedHSSL",
                "its recipe for Avazu",
                "halves",
                2,
                _CLICK_RECIPE,
                silent="No paper here uses Criteo. It is drawn and divided as FedHSSL does it "
                "with Avazu; a number that is missing becomes 0.",
            ),
        ),
        memory="about 2 GB",
        options=_CLICK_OPTIONS,
    ),
    # GISETTE (Guyon et al. 2004) has the digits 4 and 9, with many columns without information.
    "gisette": _libsvm_set(
        "GISETTE",
        {
            TRAIN: (Need("gisette_scale.bz2", ("gisette_scale",)), 6_000),
            TEST: (Need("gisette_scale.t.bz2", ("gisette_scale.t",)), 1_000),
        },
        5_000,
        {-1.0: "4", 1.0: "9"},
        _columns_use(
            "Tables 4, 5, 6, 7, 10; Figs. 5, 6, 8",
            _fedonce_mlp([100, 100, 50], [30, 30], (1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 100)),
            "The paper counts 6,000 rows, which are those for training, and divides them into five "
            "folds. Here the makers' own test rows are for testing.",
            validation=0.1,
        ),
        "about 500 MB",
    ),
    "movielens": DataSet(
        title="MovieLens 1M",
        publisher="GroupLens (https://grouplens.org/datasets/movielens/1m)",
        holds="a user and a movie, and what is known of them",
        rows=_RATINGS,
        task={"kind": "regression"},
        forms=tuple(
            Form((need,), partial(_read_movielens, need.name))
            for need in (Need("ml-1m.zip"), Need("ml-1m", folder=True))
        ),
        divisions={
            "sources": Division(
                "who rates what at one, what is known of user and movie at the other",
                _make_source_parts,
                (2,),
            )
        },
        uses=(
            PaperUse(
                "FedOnce",
                "Tables 4, 5, 8; Figs. 5, 6",
                "sources",
                2,
                # The values of Tables 2 and 5.
                dividing.fedonce(_NCF, [10], (1e-4, 1e-5, 64, 30), (1e-4, 2e-4, 64, 40)),
                silent="The paper does not say what its 133 auxiliary numbers are. Here the other "
                "party has gender, age and occupation of the user, and genres and year of the "
                "movie. The paper's NCF is the encoder `tabular`: an embedding of each identity, "
                "then the same layers. With `--active 2` it takes d = 48, 100 epochs and the rate "
                "5e-4 for the host; the recipe has the numbers of host 0.",
            ),
        ),
        memory="about 500 MB",
    ),
    "nuswide": DataSet(
        title="NUS-WIDE",
        publisher=_NUS_PUBLISHER,
        holds="634 numbers of an image, and which of 1,000 tags it has; ten classes",
        rows=sum(_NUS_ROWS.values()),
        task={"kind": "multiclass", "classes": _CONCEPTS},
        forms=_nuswide_forms((_FEATURES, _TAGS, _TRUTH), _read_nuswide),
        divisions={
            "modalities": Division(
                "the features of images at one, the tags at the other", _make_modality_parts, (2,)
            ),
            "columns": COLUMNS,
        },
        uses=(
            PaperUse(
                "FedHSSL",
                _FEDHSSL_TABLES,
                "modalities",
                2,
                # The values of Table III and Appendix B.
                dividing.fedhssl({"kind": "mlp", "hidden": [512]}, 128, rounds=10, batch_size=512),
                silent="The paper does not say which ten concepts it takes, nor what becomes of "
                "images that show several of them. As its released code does, the ten concepts "
                "with the most images are taken, and the images that show exactly one of them. It "
                "does not say how wide its two layers are.",
            ),
        ),
        memory="about 500 MB",
    ),
    "nuswide_sky": DataSet(
        title="NUS-WIDE (sky)",
        publisher=_NUS_PUBLISHER,
        holds="634 numbers of an image, in five views",
        rows=sum(_NUS_ROWS.values()),
        task={"kind": "binary"},
        forms=_nuswide_forms((_FEATURES, _TRUTH), _read_sky, _NUS_ROWS),
        divisions={
            "views": Division(
                "one kind of feature: CH, CM55, CORR, EDH, WT", _make_view_parts, (5,)
            ),
            "columns": COLUMNS,
        },
        uses=(
            PaperUse(
                "FedOnce",
                "Tables 4, 5, 8; Figs. 5, 6",
                "views",
                5,
                _fedonce_mlp([60], [50], (3e-4, 1e-5, 128, 50), (7e-5, 1e-5, 128, 50), d=8),
                validation=0.1,
                silent="The paper's Table 1 counts 66, 144, 75, 128 and 225 numbers in the five "
                "views; the files have 64, 144, 73, 128 and 225. It does not say in which order "
                "the views are hosts, nor which rows are for validation. Here the makers' split "
                "is kept.",
            ),
        ),
        memory="about 500 MB",
    ),
    # Phishing Websites (Mohammad, Thabtah and McCluskey 2012) has columns of 0 and 1.
    "phishing": _libsvm_set(
        "Phishing Websites",
        {"": (Need("phishing", ("phishing.bz2", "phishing.txt")), 11_055)},
        68,
        {0.0: "legitimate", 1.0: "phishing"},
        _columns_use(
            "Tables 4, 5, 6, 7, 10; Figs. 5, 6, 9",
            _fedonce_mlp([30, 30], [30], (1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 300)),
            "The paper does not say which rows are for validation; it tunes by five folds. The "
            "recipe divides the rows at random.",
        ),
        "about 100 MB",
        Form(
            (Need("phishing.csv.gz"),),
            _read_phishing_csv,
            {"": 11_055},
            "a CSV file of the same rows, with the columns f0 to f67 and y",
        ),
    ),
    "superconduct": DataSet(
        title="Superconductivty Data",
        publisher="UCI (https://archive.ics.uci.edu/dataset/464), as the zip file of these two "
        "tables",
        holds="81 numbers",
        rows=21_263,
        task={"kind": "regression"},
        forms=tuple(
            Form((need,), partial(_read_superconduct, need.name), {"": 21_263})
            for need in (Need(_SUPER_ZIP, ("superconduct.zip",)), Need(_SUPER_TABLE))
        ),
        divisions={"columns": COLUMNS},
        uses=(
            _columns_use(
                "Tables 4, 5, 6, 10; Figs. 5, 6",
                _fedonce_mlp([30, 30], [30, 10], (3e-4, 1e-4, 100, 500), (3e-4, 1e-4, 128, 600)),
                "The paper does not say which rows are for validation; it tunes by five folds. The "
                "recipe divides the rows at random, and its `rmse` is in kelvin.",
            ),
        ),
        memory="about 100 MB",
    ),
    "ujiindoorloc": DataSet(
        title="UJIIndoorLoc",
        publisher="UCI (https://archive.ics.uci.edu/dataset/310), with "
        f"{_UJI_FILES[0]} and {_UJI_FILES[1]}",
        holds="the strengths of 520 access points, 100 for one that is not heard",
        rows=_UJI_ROWS,
        task={"kind": "regression"},
        forms=(
            Form((Need(_UJI_ZIP, ("UJIndoorLoc.zip",)),), _read_uji_zip),
            Form(
                tuple(map(Need, _UJI_FILES)),
                lambda files, request: _read_uji(
                    [str(files[name]) for name in _UJI_FILES], request
                ),
            ),
            Form(
                (Need(_UJI_PARQUET),),
                _read_uji_parquet,
                unofficial="a Parquet file of the same rows",
            ),
        ),
        divisions={"columns": COLUMNS, "importance": IMPORTANCE},
        uses=(
            _columns_use(
                "Tables 4, 5, 6, 10; Figs. 5, 6, 9",
                _fedonce_mlp(
                    [50, 50, 50, 30], [30, 10], (3e-4, 1e-4, 100, 500), (1e-4, 1e-4, 100, 600)
                ),
                "The paper does not say which column is the label, nor which other ones are among "
                "its 529 columns. Here the label is the longitude, and the columns are the 520 "
                "access points. It puts both files together and tunes by five folds; the recipe "
                "divides their rows at random. `--set split=makers` keeps the second file, which "
                "was recorded four months later, for testing.",
            ),
        ),
        memory="about 200 MB",
        options={
            "label": ("LONGITUDE", "The column to predict, LONGITUDE or LATITUDE, in metres."),
            "split": ("random", "makers: the rows of validationData.csv are the test rows."),
            **ALPHA,
        },
    ),
}
