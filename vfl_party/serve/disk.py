"""Whether a serving party can write its record, without which nothing leaves."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from vfl_common.errors import Code, VflError
from vfl_common.files import require_writable
from vfl_common.rpc.serving.answered import OutgoingMessage, RecordMessage

log = logging.getLogger(__name__)


class Disk:
    """Notes whether the last write has failed; any thread may ask.

    Args:
        folder: of the record.
        say: shows a sentence to the person here, once per failure.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._lock, self._failed = threading.Lock(), False

    def watched(self, write: RecordMessage) -> RecordMessage:
        """Returns ``write``, with its failures noted."""

        def write_watched(outgoing: OutgoingMessage) -> None:
            try:
                write(outgoing)
            except VflError as error:
                # The account or a grant refuses with another code.
                if error.code is Code.FILE_INVALID:
                    self._note(error)
                raise
            # A short line may have found room where the next one does not.
            self.ready()

        return write_watched

    def ready(self) -> bool:
        """Whether the record can be written. After a failure this writes a file for a trial: a
        caller that waits for readiness sends nothing that is recorded.
        """
        if self._failed:
            with contextlib.suppress(VflError):
                require_writable(self._folder)
                self._note(None)
        return not self._failed

    def _note(self, error: VflError | None) -> None:
        with self._lock:
            before, self._failed = self._failed, error is not None
        if before == (error is not None):
            return
        if error is not None:
            text = f"{error} No request is answered until then."
            log.error("%s", text, extra={"event": "unwritable"})
        else:
            text = f"{self._folder}: can be written again; requests are answered"
            log.warning("%s", text, extra={"event": "written"})
        self._say(text)
