"""The parties' data in memory: frames, and the roles of their columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl_common.config.data import parse_id_columns
from vfl_common.config.sources import FRAME, resolve_source
from vfl_common.errors import Code, InputError
from vfl_common.files import write_error


@dataclass(frozen=True)
class Data:
    """One party's rows, and the roles of its columns.

    Args:
        frame: a pandas or polars frame, an Arrow table, a dict of NumPy arrays, the path of a file,
            or any other source of a ``[data]`` table.
        id: the column of ids, by which the parties' rows are matched, or several columns that form
            one id. A dict of arrays needs no ids if all parties have the same rows in the same
            order.
        label: the column to predict, for the active party only.
        settings: any other key of a party's ``[data]`` table, such as ``drop`` or ``missing``
            (``docs/reference/party-file.md``).
    """

    frame: Any
    id: str | Sequence[str] | None = None
    label: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> dict[str, Any]:
        """Returns the keys that are set, as in a party's [data] table."""
        columns = {"id": self.id, "label": self.label}
        return {
            **self.settings,
            **{key: value for key, value in columns.items() if value is not None},
        }


def add_data(
    tables: dict[str, Any], data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adds data to a recipe's tables. Returns the tables, and {party: its frame}.

    ``data``: {party: a frame, ``Data``, or a path}. The roles of columns in ``Data`` replace those
    of the recipe's ``[simulate.parties.NAME]``. Raises InputError if a name in ``data`` is not a
    party's, or if the data of a party are missing.
    """
    if not isinstance(data, Mapping):
        raise InputError(
            Code.CONFIG_INVALID,
            f"data: must be a dict (got {type(data).__name__}). Give {{party: its rows}}.",
        )
    if not data:
        return tables, {}
    roles = {
        str(p.get("name")): p.get("role") for p in tables.get("parties", ()) if isinstance(p, dict)
    }
    names = list(roles)
    for name in data:
        if name not in names:
            raise InputError(
                Code.CONFIG_INVALID,
                f"data: {name!r} is not a party of the recipe. Choose one of {', '.join(names)}.",
            )
    simulate = dict(tables.get("simulate", {}))
    parties, frames = dict(simulate.get("parties", {})), {}
    for name, rows in data.items():
        table = dict(parties.get(name, {}))
        if isinstance(rows, str | os.PathLike):
            parties[name] = table | {"source": resolve_source(os.fspath(rows), Path())}
            continue
        party_data = rows if isinstance(rows, Data) else Data(rows)
        if party_data.label is not None and roles[name] == "passive":
            raise InputError(
                Code.CONFIG_INVALID,
                f"data: {name} is passive and has no label (got label={party_data.label!r}). Leave "
                "label out, or drop the column.",
            )
        if isinstance(party_data.frame, str | os.PathLike):
            parties[name] = (
                table
                | party_data.table()
                | {"source": resolve_source(os.fspath(party_data.frame), Path())}
            )
            continue
        frames[name] = party_data.frame
        parties[name] = _add_id(table | party_data.table(), party_data.frame) | {
            "source": f"{FRAME}{name}"
        }
    missing = [name for name in names if name not in parties and "data" not in simulate]
    if missing:
        raise InputError(
            Code.CONFIG_INVALID,
            f"data: rows of {', '.join(missing)} are missing. Give {{party: its rows}} for "
            "every party.",
        )
    return tables | {"simulate": simulate | {"parties": parties}}, frames


def _add_id(table: dict[str, Any], frame: Any) -> dict[str, Any]:
    """Returns the table with ``id = "id"`` if it names no column of ids and the frame has a column
    ``id``.
    """
    from vfl_party.data.sources.frames import is_lazy

    # A lazy frame raises its error when it is read.
    if is_lazy(frame):
        return table
    columns = frame.keys() if isinstance(frame, Mapping) else getattr(frame, "columns", ())
    # The attribute ``columns`` of an Arrow table has the values, not the names.
    names = getattr(frame, "column_names", columns)
    return table if "id" in table or "id" not in list(names) else table | {"id": "id"}


def write_frames(
    frames: Mapping[str, Any], parties: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Writes frames to files that only their owner may read, for parties in other processes.

    ``parties``: the recipe's ``[simulate.parties]``. Returns these tables with the files as
    sources. Raises InputError.
    """
    import pyarrow.parquet

    from vfl_party.data.sources.frames import as_arrow, is_arrays, write_arrays

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    tables = dict(parties)
    for name, frame in frames.items():
        table = dict(parties[name])
        ids = parse_id_columns(table.get("id"))
        path = folder / f"{name}.{'npz' if is_arrays(frame) else 'parquet'}"
        try:
            with os.fdopen(
                os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb"
            ) as file:
                if is_arrays(frame):
                    write_arrays(frame, file)
                    left_out = {
                        *ids,
                        *(table.get(key) for key in ("label", "event", "group", "weight", "split")),
                        *table.get("labels", ()),
                        *table.get("drop", ()),
                    }
                    table.setdefault("columns", [str(key) for key in frame if key not in left_out])
                else:
                    pyarrow.parquet.write_table(as_arrow(frame, f"{FRAME}{name}", ids), file)
        except OSError as error:
            raise write_error(path, error) from None
        tables[name] = table | {"source": str(path.resolve())}
    return tables
