"""Tells of requests that have ended: to the access log, and to a tracing system."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_common.errors import InputError
from vfl_common.process.logs import own_log
from vfl_common.process.tracing import RequestSpans, requests_traced
from vfl_party.serve.telling.request import ToldRequest

# In the party's folder of a run.
FILE = "serve-access.jsonl"


class AccessLogs:
    """The access logs of the runs that a party serves; any thread may write.

    ``folder``: the party's of the run that is served first. Its log has the requests that ask no
    run, too. Raises InputError if it cannot be opened.
    """

    def __init__(self, folder: Path, party: str) -> None:
        self._out, self._place, self._party = folder.parent.parent, folder.name, party
        self._first = own_log(folder / FILE, party=party)
        self._of = {"": self._first, folder.parent.name: self._first}
        self._opening = threading.Lock()

    def of(self, run_id: str) -> logging.Logger:
        """Returns the log of a run; the first one, if its folder is gone or cannot be written."""
        with self._opening:
            found = self._of.get(run_id)
            if found is None:
                folder, found = self._out / run_id / self._place, self._first
                with contextlib.suppress(InputError):
                    if folder.is_dir():
                        found = own_log(folder / FILE, party=self._party)
                self._of[run_id] = found
            return found

    def close(self) -> None:
        """Closes all logs."""
        for log in self._of.values():
            for each in log.handlers:
                each.close()


class Teller:
    """Any thread may tell.

    Args:
        logs: of the requests; None for none.
        spans: of the requests; None for none.
    """

    def __init__(self, logs: AccessLogs | None, spans: RequestSpans | None) -> None:
        self._logs, self._spans = logs, spans

    def ended(self, request: ToldRequest, status: int) -> None:
        """Tells of a request. ``status``: of HTTP, also for gRPC."""
        ended_ns = time.time_ns()
        facts: dict[str, str | int] = {
            "protocol": request.protocol,
            "route": request.route,
            "caller": request.caller,
            "model": request.model,
            "run": request.run_id,
            "rows": request.rows,
            "status": status,
        }
        if self._logs is not None:
            took_ms = round((ended_ns - request.began_ns) / 1e6, 3)
            extra = {"event": "request", **facts, "ms": took_ms}
            self._logs.of(request.run_id).info("request", extra=extra)
        if self._spans is not None:
            times = request.began_ns, ended_ns
            self._spans.tell("request", times, facts, request.stages, request.parent)


@contextmanager
def telling(folder: Path, party: str, *, access_log: bool) -> Iterator[Teller | None]:
    """Yields what tells of requests, if the party file asks for an access log, or the environment
    for traces. Raises InputError.
    """
    with requests_traced("vfl-party", party) as spans:
        logs = AccessLogs(folder, party) if access_log else None
        try:
            yield Teller(logs, spans) if logs is not None or spans is not None else None
        finally:
            if logs is not None:
                logs.close()
