"""The data of the parties, if they are in memory: frames, and what their columns mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl_common.config.data import FRAME, id_columns, resolved
from vfl_common.errors import Code, InputError
from vfl_common.files import unwritable


@dataclass(frozen=True)
class Data:
    """One party's rows, and what its columns mean.

    Args:
        frame: a pandas or polars frame, an Arrow table, a dict of NumPy arrays, the path of a file,
            or any other source of a ``[data]`` table.
        id: the column of ids, by which the parties' rows are compared, or several that are one id
            together; a dict may do without, if all parties have the same rows in the same order.
        label: the column to predict; the active party's.
        settings: any other key of a party's ``[data]`` table, such as ``drop`` or ``missing``
            (``docs/reference/party-file.md``).
    """

    frame: Any
    id: str | Sequence[str] | None = None
    label: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> dict[str, Any]:
        """Returns the keys that are set, as in a party's [data] table."""
        named = {"id": self.id, "label": self.label}
        return {
            **self.settings,
            **{key: value for key, value in named.items() if value is not None},
        }


def with_data(
    tables: dict[str, Any], data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a recipe's tables with each party's data in memory, and {party: its frame}.

    ``data``: {party: a frame, ``Data``, or a path}. What the recipe's ``[simulate.parties.NAME]``
    says of the columns holds, unless ``Data`` says otherwise. Raises InputError for a name that is
    no party.
    """
    if not isinstance(data, Mapping):
        raise InputError(
            Code.CONFIG_INVALID, f"data: give {{party: its rows}}, not {type(data).__name__}"
        )
    if not data:
        return tables, {}
    roles = {
        str(p.get("name")): p.get("role") for p in tables.get("parties", ()) if isinstance(p, dict)
    }
    names = list(roles)
    for name in data:
        if name not in names:
            text = f"data: {name!r} is no party of the recipe (parties: {', '.join(names)})"
            raise InputError(Code.CONFIG_INVALID, text)
    simulate = dict(tables.get("simulate", {}))
    parties, frames = dict(simulate.get("parties", {})), {}
    for name, given in data.items():
        known = dict(parties.get(name, {}))
        if isinstance(given, str | os.PathLike):
            parties[name] = known | {"source": resolved(os.fspath(given), Path())}
            continue
        found = given if isinstance(given, Data) else Data(given)
        if found.label is not None and roles[name] == "passive":
            text = (
                f"data: {name} is passive and has no label; leave label={found.label!r} out, "
                "or drop the column"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        if isinstance(found.frame, str | os.PathLike):
            parties[name] = (
                known | found.table() | {"source": resolved(os.fspath(found.frame), Path())}
            )
            continue
        frames[name] = found.frame
        parties[name] = _with_id(known | found.table(), found.frame) | {"source": f"{FRAME}{name}"}
    missing = [name for name in names if name not in parties and "data" not in simulate]
    if missing:
        raise InputError(
            Code.CONFIG_INVALID,
            f"data: rows of {', '.join(missing)} are missing; give {{party: its rows}}",
        )
    return tables | {"simulate": simulate | {"parties": parties}}, frames


def _with_id(table: dict[str, Any], frame: Any) -> dict[str, Any]:
    """Takes the column ``id`` if nothing says which column has the ids."""
    from vfl_party.data.sources.frames import is_lazy

    # Refused when it is read.
    if is_lazy(frame):
        return table
    columns = frame.keys() if isinstance(frame, Mapping) else getattr(frame, "columns", ())
    # Of an Arrow table, whose ``columns`` are the values.
    names = getattr(frame, "column_names", columns)
    return table if "id" in table or "id" not in list(names) else table | {"id": "id"}


def write_frames(
    frames: Mapping[str, Any], parties: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Writes frames as files that only their owner may read, for parties in processes.

    ``parties``: the recipe's ``[simulate.parties]``. Returns them with the files as sources. Raises
    InputError.
    """
    import pyarrow.parquet

    from vfl_party.data.sources.frames import as_arrow, is_arrays, write_arrays

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = dict(parties)
    for name, frame in frames.items():
        table = dict(parties[name])
        ids = id_columns(table.get("id"))
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
            raise unwritable(path, error) from None
        found[name] = table | {"source": str(path.resolve())}
    return found
