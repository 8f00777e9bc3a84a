"""Logs refused callers at a limited rate, and counts them by error code."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from vfl_common.errors import Code, VflError
from vfl_common.rpc.guard.rate import Rate, append_held_count
from vfl_common.text import LINE, clean

# The time between two log lines about one caller, after the first ``_AT_ONCE`` lines.
_EVERY_S = 10.0
_AT_ONCE = 5

log = logging.getLogger(__name__)


class Refusals:
    """Records the refusals of one service. ``show``: called for each logged refusal, to report it
    to a person.
    """

    def __init__(self, show: Callable[..., None] = lambda _event, **_facts: None) -> None:
        self._show = show
        self._rate = Rate(_EVERY_S, _AT_ONCE)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, party: str, error: BaseException) -> None:
        """Counts and logs a refusal. ``party``: the name in the caller's certificate; '' if it has
        none.
        """
        code = error.code if isinstance(error, VflError) else Code.INTERNAL
        with self._lock:
            self._counts[code.name] += 1
        held = self._rate.passes(party, time.monotonic())
        if held is None:
            return
        text = append_held_count(f"refused {party or 'a caller without a name'}: {error}", held)
        log.warning(
            text, extra={"event": "refused", "party": party, "code": code.name, "more": held}
        )
        self._show(
            "refused",
            party=party,
            code=code.name,
            why=clean(append_held_count(str(error), held), LINE),
        )

    def counts(self) -> Counter[str]:
        """Returns {error code: number of refusals}."""
        with self._lock:
            return self._counts.copy()
