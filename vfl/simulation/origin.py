"""Where the data and modules of a run on this machine came from: noted in its folder, so that it
can predict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, unwritable

FILE = "simulated.json"


@dataclass(frozen=True)
class Origin:
    """``base``: the folder with the recipe's own modules. ``data``: {party: its [data]}, with
    absolute paths.
    """

    base: Path
    data: Mapping[str, DataSettings]

    def parts(self) -> dict[str, DataSettings]:
        """Returns the data of each party, also of those whose columns a baseline has joined."""
        return {
            name: own
            for each, of in self.data.items()
            for name, own in (of.parts or {each: of}).items()
        }

    def note(self, folder: Path) -> None:
        """Writes it into a run's folder, which is made if missing. Raises InputError.

        Only the owner may read it: the URL of a database may hold a password, without which nothing
        can be predicted.
        """
        data = {
            name: each.model_dump(mode="json", exclude_defaults=True)
            for name, each in self.data.items()
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from None
        text = json.dumps({"base": str(self.base.resolve()), "data": data}, indent=1) + "\n"
        with private_file(folder / FILE) as file:
            file.write(text.encode())

    @classmethod
    def of(cls, folder: Path) -> Origin:
        """Reads the note of a run. Raises InputError if there is none: the run's parties have their
        own machines.
        """
        path = folder / FILE
        try:
            found = json.loads(path.read_bytes())
            data = {name: DataSettings.model_validate(each) for name, each in found["data"].items()}
            return cls(Path(found["base"]), data)
        except FileNotFoundError:
            text = f"{folder}: does not say what data the parties had ({FILE} is missing)"
            raise InputError(
                Code.FILE_INVALID,
                f"{text}; for a run of separate machines, every party runs vfl-party predict",
            ) from None
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                Code.FILE_INVALID, f"{path}: is damaged; train again, or restore it"
            ) from None
