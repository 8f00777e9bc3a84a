"""The origin of a run's data and modules on this machine. The run's folder records it for later
predictions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_error

FILE = "simulated.json"


@dataclass(frozen=True)
class Origin:
    """The origin of a run. ``base``: the folder with the recipe's own modules. ``data``: {party:
    its data settings}, with absolute paths.
    """

    base: Path
    data: Mapping[str, DataSettings]

    def parts(self) -> dict[str, DataSettings]:
        """Returns the data of each party, including those whose columns a baseline has joined."""
        return {
            name: part
            for party, joint in self.data.items()
            for name, part in (joint.parts or {party: joint}).items()
        }

    def note(self, folder: Path) -> None:
        """Writes the origin into a run's folder, which is created if it does not exist. Raises
        InputError.

        Only the owner may read the file, because the URL of a database may contain a password.
        """
        data = {
            name: party.model_dump(mode="json", exclude_defaults=True)
            for name, party in self.data.items()
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from None
        text = json.dumps({"base": str(self.base.resolve()), "data": data}, indent=1) + "\n"
        with private_file(folder / FILE) as file:
            file.write(text.encode())

    @classmethod
    def of(cls, folder: Path) -> Origin:
        """Reads the origin of a run. Raises InputError if the folder has no origin, because the
        parties of the run have separate machines.
        """
        path = folder / FILE
        try:
            tables = json.loads(path.read_bytes())
            data = {name: DataSettings.model_validate(d) for name, d in tables["data"].items()}
            return cls(Path(tables["base"]), data)
        except FileNotFoundError:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: does not record the parties' data ({FILE} is missing). Run "
                "vfl-party predict at every party if they have separate machines.",
            ) from None
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be read ({error.strerror}). Make the file readable.",
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                Code.FILE_INVALID, f"{path}: is damaged. Train again, or restore it."
            ) from None
