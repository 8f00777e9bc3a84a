"""Prepares the data sets of tables, each once, with ``vfl prepare``."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import vfl
from benchmarks.papers.describe import Data, Scale, Tables, resolved
from benchmarks.papers.plan import Variant
from vfl.simulation.own_files import of_party_files

# Written when a data set is whole.
_READY = "ready.json"


class Sources:
    """The data sets as their makers distribute them, in ``given``, and as prepared, in ``own``."""

    def __init__(self, given: Path, own: Path) -> None:
        self._given, self._own = given.absolute(), own.absolute()

    def base(self, variant: Variant, scale: Scale) -> Tables:
        """Returns parties, rows and simulate of a variant's data set, with absolute paths. Raises
        VflError if the files are not there.
        """
        data, options = variant.data, {**variant.data.options, **variant.first.prepare}
        how: dict[str, Any] = {
            "parties": variant.parties,
            "rows": resolved(data.rows, scale),
            **resolved(options, scale),
        }
        if not hasattr(vfl, "prepare"):
            from benchmarks.papers import at_hand
            return at_hand.base(data.prepare, self._given, self._own, **how)
        found = self._prepared(data, how)
        tables, folder = of_party_files([Path(each) for each in found["parties"]])
        simulate = dict(tables["simulate"])
        simulate["parties"] = {
            name: _absolute(each, folder) for name, each in simulate["parties"].items()
        }
        return {
            "parties": tables["parties"],
            "rows": tables.get("rows", {}),
            "simulate": simulate,
        }

    def _prepared(self, data: Data, how: dict[str, Any]) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps([data.prepare, how], sort_keys=True).encode())
        folder = self._own / f"{data.prepare}-{digest.hexdigest()[:12]}"
        ready = folder / _READY
        if not ready.exists():
            # Of an attempt that was ended.
            shutil.rmtree(folder, ignore_errors=True)
            made = vfl.prepare(data.prepare, self._given, folder, seed=0, **how)
            ready.write_text(json.dumps({"parties": [str(each) for each in made.parties.values()]}))
        found: dict[str, Any] = json.loads(ready.read_text())
        return found


def _absolute(settings: Tables, folder: Path) -> Tables:
    """Returns a party's data settings with its paths from ``folder``."""
    from vfl_common.config.data import DataSettings

    whole = DataSettings.model_validate(settings).absolute(folder)
    return whole.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
