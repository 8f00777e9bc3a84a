"""Stores the parties that have left a run, so that a restarted server does not wait for them."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.summary import PartySummary


@dataclass(frozen=True)
class Left:
    """A party that has sent its report and left the run. It exchanges no more data in the run."""

    identity: PartySummary
    report: control_pb2.Report


@dataclass(frozen=True)
class Departures:
    """Stores departures in the file ``left.json``: {party: {identity, report}}. The report is the
    party's message in base64.
    """

    path: Path

    def add(self, left: Left) -> None:
        """Records in the file that a party has left."""
        report = b64encode(left.report.SerializeToString()).decode()
        entry = {"identity": left.identity.model_dump(mode="json"), "report": report}
        write_atomic(self.path, json.dumps(self._entries() | {left.identity.name: entry}) + "\n")

    def read(self) -> dict[str, Left]:
        """Reads {party: its identity and report}. Raises InputError if the file is not in the
        format that ``add`` writes.
        """
        try:
            return {
                name: Left(
                    PartySummary.model_validate(entry["identity"]),
                    control_pb2.Report.FromString(b64decode(entry["report"])),
                )
                for name, entry in self._entries().items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self.path}: the file cannot be read ({error}). Begin a new run with --fresh "
                "at the "
                "server and every party.",
            ) from None

    def _entries(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}
