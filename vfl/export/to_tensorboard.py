"""Writes rounds as event files with TensorBoard's own writer, which needs neither TensorFlow nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vfl.report.rounds import PartyFolder, RoundLine
from vfl_common.errors import Code, InputError

INSTALL = "pip install tensorboard"
# The suffix of our files, so that no others are replaced.
SUFFIX = ".vfl"


class TensorBoard:
    """A party's folder of event files. Raises InputError if the package is missing or the folder
    cannot be written.
    """

    def __init__(self, source: PartyFolder, out: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise InputError(
                Code.CONFIG_INVALID,
                "vfl export tensorboard: TensorBoard cannot be imported "
                f"({str(error).splitlines()[0]}). Install it with `{INSTALL}`.",
            ) from None
        self._events, self._summaries, self._writers = event_pb2, summary_pb2, event_file_writer
        self._folder = out / source.run_id / source.party
        self._written: list[RoundLine] = []
        self._writer = self._open()

    def _open(self) -> Any:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for older in self._folder.glob(f"events.out.tfevents.*{SUFFIX}"):
                older.unlink()
            return self._writers.EventFileWriter(str(self._folder), filename_suffix=SUFFIX)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self._folder}: cannot be written ({error.strerror}). Give another folder with "
                "--out.",
            ) from None

    def update(self, rounds: Sequence[RoundLine]) -> None:
        """Writes the rounds that are new; after a rollback, all of them again."""
        # A rollback has replaced rounds that were written before.
        if list(rounds[: len(self._written)]) != self._written:
            self._writer.close()
            self._writer, self._written = self._open(), []
        for line in rounds[len(self._written) :]:
            values = [
                self._summaries.Summary.Value(tag=tag, simple_value=value)
                for tag, value in line.values.items()
            ]
            summary = self._summaries.Summary(value=values)
            self._writer.add_event(
                self._events.Event(wall_time=line.time_s, step=line.steps, summary=summary)
            )
        self._written = list(rounds)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        """Closes the file of events."""
        _ = finished
        self._writer.close()
