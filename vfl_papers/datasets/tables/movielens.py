"""MovieLens 1M (Harper and Konstan 2015): 1,000,209 ratings of movies, of users."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from vfl_papers import recipes
from vfl_papers.columns.official import (
    WORD,
    ColumnFiles,
    FileTree,
    Types,
    damage_error,
    file,
    row_count_note,
)
from vfl_papers.dataset import (
    BLOCK_ROWS,
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
)
from vfl_papers.dividing import make_parts, pick_columns

_ZIP, _FOLDER = "ml-1m.zip", "ml-1m"
_RATINGS = 1_000_209
_IDENTITIES = ("user", "movie")
_AUXILIARY = ("gender", "age", "occupation")
_GENRES = (
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
_YEAR = re.compile(r"\((\d{4})\)\s*$")
_NUMBER = pa.int32()
# The values of Tables 2 and 5: of the party with the identities, and of the other one.
_NCF, _OTHER = ({"kind": "tabular", "hidden": hidden} for hidden in ([32, 16], [128]))
_FEDONCE = recipes.fedonce(_NCF, [10], (1e-4, 1e-5, 64, 30), (1e-4, 2e-4, 64, 40))
_SILENT = (
    "The paper does not say what its 133 auxiliary numbers are. Here the other party has gender, "
    "age and occupation of the user, and genres and year of the movie. The paper's NCF is the "
    "encoder `tabular`: an embedding of each identity, then the same layers. With `--active 2` it "
    "takes d = 48, 100 epochs and the rate 5e-4 for the host; the recipe has the numbers of host 0."
)


def _read(needed: str, files: Files, _: Request) -> Content:
    place = FileTree(files[needed])
    names = (*_IDENTITIES, "rating", "time")
    ratings = _table(place, "ratings.dat", dict.fromkeys(names, _NUMBER))
    pairs = {name: ratings.array(name) for name in (*_IDENTITIES, "rating")}
    looked_up = _LookUp(place, ratings.files[0].source, pairs)
    return Content(
        pairs["rating"].astype(np.float64),
        None,
        looked_up.blocks,
        differs=row_count_note(len(pairs["rating"]), _RATINGS),
    )


def _table(place: FileTree, name: str, types: Types) -> ColumnFiles:
    """Returns a file of the data set; movies' titles are Latin-1."""
    layout = {"format": "text", "separator": "::", "encoding": "latin-1", "names": tuple(types)}
    return ColumnFiles((file(place.source(name), **layout),), types)


class _LookUp:
    """Joins each rating with the columns of its user and movie. All of it is in memory."""

    def __init__(self, place: FileTree, source: str, pairs: dict[str, Array]) -> None:
        users = _table(
            place,
            "users.dat",
            {"user": _NUMBER, "gender": WORD, "age": WORD, "occupation": WORD, "zip": WORD},
        )
        movies = _table(place, "movies.dat", {"movie": _NUMBER, "title": WORD, "genres": WORD})
        self._pairs, self._places = pairs, dict[str, Array]()
        for name, table in (("user", users), ("movie", movies)):
            self._places[name] = _places(source, name, table.array(name), pairs[name])
        self._users = pa.table({name: users.array(name) for name in _AUXILIARY})
        self._movies = _of_movies(movies)

    def blocks(self, rows: Rows) -> Iterator[Block]:
        """Yields the features of ratings."""
        for start in range(0, len(rows), BLOCK_ROWS):
            own = rows[start : start + BLOCK_ROWS]
            features = {name: self._pairs[name][own].astype(str) for name in _IDENTITIES}
            for name, table in (("user", self._users), ("movie", self._movies)):
                taken = table.take(pa.array(self._places[name][own]))
                features |= {column: taken.column(column) for column in taken.column_names}
            yield pa.table(features)


def _places(source: str, name: str, known: Array, wanted: Array) -> Array:
    """Returns the row of each identity. Raises InputError if one is not known."""
    order = np.argsort(known, kind="stable")
    indices = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
    places: Array = order[indices]
    wrong = known[places] != wanted
    if wrong.any():
        row = int(wrong.argmax()) + 1
        raise damage_error(source, f"row {row:,} has a {name} that {name}s.dat does not list")
    return places


def _of_movies(movies: ColumnFiles) -> pa.Table:
    """Returns year and genres of each movie, a column of 0 and 1 a genre. Raises InputError."""
    years, listed = [], []
    texts = (movies.array(name).tolist() for name in ("title", "genres"))
    for row, (title, words) in enumerate(zip(*texts, strict=True), 1):
        year, own = _YEAR.search(title), set(words.split("|"))
        if year is None or not own <= {*_GENRES}:
            raise damage_error(
                movies.files[0].source, f"row {row:,} has no year, or an unknown genre"
            )
        years.append(int(year[1]))
        listed.append(own)
    has = {name: np.array([name in own for own in listed], np.uint8) for name in _GENRES}
    genres = {f"genre_{name}": values for name, values in has.items()}
    return pa.table({"year": np.array(years, np.int32), **genres})


def _by_source(_: Content, request: Request) -> Sequence[ContentPart]:
    names = (*_AUXILIARY, "year", *(f"genre_{name}" for name in _GENRES))
    parts = make_parts(request, [pick_columns(_IDENTITIES), pick_columns(names)])
    return [replace(part, encoder=_NCF if part.name == "party-1" else _OTHER) for part in parts]


DATASET = DataSet(
    title="MovieLens 1M",
    publisher="GroupLens (https://grouplens.org/datasets/movielens/1m)",
    holds="a user and a movie, and what is known of them",
    rows=_RATINGS,
    task={"kind": "regression"},
    forms=(
        Form((Need(_ZIP),), partial(_read, _ZIP)),
        Form((Need(_FOLDER, folder=True),), partial(_read, _FOLDER)),
    ),
    divisions={
        "sources": Division(
            "who rates what at one, what is known of user and movie at the other", _by_source, (2,)
        )
    },
    uses=(
        PaperUse("FedOnce", "Tables 4, 5, 8; Figs. 5, 6", "sources", 2, _FEDONCE, silent=_SILENT),
    ),
    memory="about 500 MB",
)
