"""A party's job for one generation: the party assembled, its rows aligned with the others', and the exchange."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vfl_common.errors import VflError
from vfl_common.run_folder import RunFolder
from vfl_party.align import Aligned, Aligning, Alignment
from vfl_party.context import Hooks
from vfl_party.exchange import Ways
from vfl_party.models import StochasticEncoder
from vfl_party.pace import Clock
from vfl_party.party import Assembled, Opened
from vfl_party.phase import Phase, Predictions, Tree
from vfl_party.results import id_names, keep, kept_table
from vfl_party.runner import Job, Statement

KEPT_SECRET = "noise-secret"  # noqa: S105 - a file: of an encoder that draws, the same in all generations


class Transport(Ways, Protocol):
    """One generation's exchange; ``app`` makes it over gRPC. ``clock``: the party's, if it is to be counted."""

    clock: Clock

    def end(self, error: VflError) -> None:
        """Wakes every waiting call with ``error``; any thread may call this."""
        ...

    def close(self, error: BaseException | None) -> None:
        """Closes the exchange and sends ``error``, if any, to the peers."""
        ...


class PartyJob(Job):
    """See ``vfl_party.runner.Job``.

    Args:
        opened: the party's data.
        alignment: decides the rows.
        assemble: assembles the party from the aligned rows.
        complete: adds what only the party's program knows to what an alignment works with.
        ready: the expected rows, and the party as it was assembled from them before joining; None if there is none, or
            if an earlier generation used it.
    """

    def __init__(
        self,
        opened: Opened,
        alignment: Alignment,
        assemble: Callable[[Aligned], Assembled],
        folder: RunFolder,
        transport: Transport,
        *,
        hooks: Hooks,
        complete: Callable[[Aligning], Aligning],
        ready: tuple[Aligned, Assembled] | None = None,
    ) -> None:
        self._opened, self._alignment, self._assemble, self._ready = opened, alignment, assemble, ready
        self._folder, self._transport, self._hooks, self._complete = folder, transport, hooks, complete
        self._assembled: Assembled | None = None

    @property
    def assembled(self) -> Assembled:
        """The party, once the job is open."""
        assert self._assembled is not None  # noqa: S101 - the runner opens a job before anything else
        return self._assembled

    @property
    def phases(self) -> Sequence[Phase]:
        return self.assembled.phases

    def open(self, *, returning: bool = False) -> None:
        opened, transport = self._opened, self._transport
        (expected, ready), self._ready = self._ready or (None, None), None
        at = Aligning(
            opened.name,
            self._folder.run_id,
            opened.table,
            self._folder.path,
            transport,
            show=self._hooks.show,
            tick=self._hooks.tick,
        )
        if returning:
            aligned = self._alignment.kept(at)
        else:
            aligned = self._alignment.align(self._complete(at))
            if opened.name != opened.recipe.active.name:
                aligned.save(self._folder.path)
        self._assembled = ready if ready is not None and aligned == expected else self._assemble(aligned)
        encoder = self._assembled.party.models.get("encoder")
        if isinstance(encoder, StochasticEncoder) and self._folder.checkpoints is not None:
            encoder.keep_secret(self._folder.path / KEPT_SECRET)
        self._assembled.connect(transport, self._hooks)

    @property
    def statement(self) -> Statement:
        party = self.assembled
        lines = [line.model_dump() for line in party.exchanges] if party.party.role == "active" else []
        data = party.prepared.fingerprint
        table = self._opened.table
        held = (0, 0) if self._alignment.certain else (len(table), len(party.prepared.table))
        if self._opened.settings.in_common and table.counts is not None:  # of tables that were joined here
            held = (table.counts.kept, len(table))
        return Statement(party.plan, party.aggregations, party.privacy_json, json.dumps(lines), data, *held)

    def unhurried(self) -> None:
        self.assembled.party.unhurried()

    def settle(self) -> None:
        if self._transport.hub is not None:
            self._transport.hub.settle()

    def state(self) -> Tree:
        return self.assembled.state()

    def load_state(self, tree: Tree) -> None:
        self.assembled.load_state(tree)

    def keep(self, folder: Path, phase: str, predictions: Predictions) -> None:
        party, ids = self.assembled, id_names(self._opened.settings)
        keep(folder, phase, kept_table(party.party.recipe, ids, party.prepared, phase, predictions))

    def end(self, error: VflError) -> None:
        self._transport.end(error)

    def close(self, error: BaseException | None) -> None:
        self._transport.close(error)


class Jobs:
    """Makes the job of each generation.

    What can be refused without the others is refused here, before joining: the party is assembled with the rows that it
    expects. The first generation uses that party if its rows turn out to be these; every later one is made afresh, so
    that nothing survives a rollback.

    Args:
        opened: the party's data.
        alignment: how the rows are decided.
        assemble: makes the party of aligned rows, in this process alone.
        spread: makes it with the party's other processes; None if there are none.
        resume: the folder of the run to resume, which may keep what this party knows of its rows.
        complete: adds what only the party's program knows to what an alignment works with.
    """

    def __init__(
        self,
        opened: Opened,
        alignment: Alignment,
        assemble: Callable[[Aligned], Assembled],
        spread: Callable[[Aligned], Assembled] | None = None,
        resume: RunFolder | None = None,
        complete: Callable[[Aligning], Aligning] = lambda at: at,
    ) -> None:
        self._opened, self._alignment, self._assemble = opened, alignment, spread or assemble
        self._complete = complete
        aligned = alignment.expected(opened.table)
        if aligned.division is None and resume is not None:
            aligned = aligned.with_kept(resume.path)
        tried = assemble(aligned)
        _ = tried.exchanges  # so that the policy sees the alignment's, too, before anybody is asked
        self._ready: tuple[Aligned, Assembled] | None = (aligned, tried)
        self._usable = spread is None and alignment.certain  # if not, its memory is better used for the alignment

    @property
    def expected(self) -> Assembled:
        """The party as it is before joining, until the first job is made."""
        assert self._ready is not None  # noqa: S101 - nobody asks later
        return self._ready[1]

    def make(self, folder: RunFolder, transport: Transport, hooks: Hooks) -> PartyJob:
        """Returns the job of the next generation."""
        ready, self._ready = self._ready if self._usable else None, None
        return PartyJob(
            self._opened,
            self._alignment,
            self._assemble,
            folder,
            transport,
            hooks=hooks,
            complete=self._complete,
            ready=ready,
        )
