"""A party's job for one generation: the party assembled, its rows aligned with the others', and the
exchange.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vfl_common.config.party import Init
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import kept_secret
from vfl_common.process.logs import aligned as sentence
from vfl_common.run_folder import RunFolder
from vfl_party.align import Aligned, Aligning, Alignment
from vfl_party.assembly.party import Assembled, Opened
from vfl_party.base.phase import Phase, Predictions, Tree
from vfl_party.base.seeds import secret_seed
from vfl_party.base.step_timing import Clock
from vfl_party.models import StochasticEncoder
from vfl_party.outbound.exchange import Ways
from vfl_party.phases.advice import advise, few_common
from vfl_party.phases.context import Hooks
from vfl_party.predict.results import id_names, keep, kept_table
from vfl_party.runtime.runner import Job, Statement

log = logging.getLogger(__name__)

KEPT_SECRET = "noise-secret"  # noqa: S105 - a file: of an encoder that draws, the same in all generations
INIT_SECRET = "init-secret"  # noqa: S105 - a file: what a party's own seeds follow from, the same in all generations
# Of that secret.
_BYTES = 32

# From the rows, and the root of the party's secret seeds.
Assemble = Callable[[Aligned, int | None], Assembled]
_SAID = {
    "secret": "initial weights and what else this party draws are secret",
    "recipe": "initial weights and what else this party draws follow from the recipe's seed, which "
    "all parties know",
}


class Transport(Ways, Protocol):
    """One generation's exchange; ``app`` makes it over gRPC. ``clock``: the party's, if it is to be
    counted.
    """

    clock: Clock

    def end(self, error: VflError) -> None:
        """Wakes every waiting call with ``error``; any thread may call this."""
        ...

    def close(self, error: BaseException | None) -> None:
        """Closes the exchange and sends ``error``, if any, to the peers."""
        ...


class PartyJob(Job):
    """See ``vfl_party.runtime.runner.Job``.

    Args:
        opened: the party's data.
        alignment: decides the rows.
        assemble: assembles the party from the aligned rows and its secret seed.
        init: what its own seeds follow from, if the run's folder does not say so; ``fresh``: a
            secret for a new run.
        complete: adds what only the party's program knows to what an alignment works with.
        ready: the expected rows, and the party as it was assembled from them before joining; None
            if there is none, or if an earlier generation used it.
    """

    def __init__(
        self,
        opened: Opened,
        alignment: Alignment,
        assemble: Assemble,
        folder: RunFolder,
        transport: Transport,
        *,
        init: Init,
        fresh: bytes,
        hooks: Hooks,
        complete: Callable[[Aligning], Aligning],
        ready: tuple[Aligned, Assembled] | None = None,
    ) -> None:
        self._opened, self._alignment, self._assemble, self._ready = (
            opened,
            alignment,
            assemble,
            ready,
        )
        self._folder, self._transport, self._hooks, self._complete = (
            folder,
            transport,
            hooks,
            complete,
        )
        self._init, self._fresh = init, fresh
        self._aligned: Aligned | None = None
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
        at = self._aligning
        if returning:
            aligned = self._alignment.kept(at)
        else:
            aligned = self._alignment.align(self._complete(at))
            if opened.name != opened.recipe.active.name:
                aligned.save(self._folder.path)
        self._aligned = aligned
        secret = own_secret(self._folder, self._init, self._fresh)
        usable = ready is not None and aligned == expected and ready.party.secret == secret
        self._assembled = ready if ready is not None and usable else self._assemble(aligned, secret)
        if not returning:
            self._tell_common()
        encoder = self._assembled.party.models.get("encoder")
        if isinstance(encoder, StochasticEncoder) and self._folder.checkpoints is not None:
            encoder.keep_secret(self._folder.path / KEPT_SECRET)
        if self._folder.checkpoints is not None:
            for phase in self._assembled.phases:
                phase.keep(self._folder.path)
        self._assembled.connect(transport, self._hooks)

    @property
    def _aligning(self) -> Aligning:
        """What an alignment works with in this generation."""
        return Aligning(
            self._opened.name,
            self._folder.run_id,
            self._opened.table,
            self._folder.path,
            self._transport,
            show=self._hooks.show,
            tick=self._hooks.tick,
        )

    def show_rows(self) -> None:
        assert self._aligned is not None  # noqa: S101 - the runner opens a job before anything else
        self._alignment.show(self._aligning, self._aligned)

    @property
    def statement(self) -> Statement:
        party = self.assembled
        lines = (
            [line.model_dump() for line in party.exchanges] if party.party.role == "active" else []
        )
        data = party.prepared.fingerprint
        return Statement(
            party.plan, party.aggregations, party.privacy_json, json.dumps(lines), data, *self._held
        )

    @property
    def _held(self) -> tuple[int, int]:
        """How many rows this party holds, and how many of them all do; (0, 0) if nobody had to find
        these.
        """
        table = self._opened.table
        # Of tables that were joined here.
        if self._opened.settings.in_common and table.counts is not None:
            return table.counts.kept, len(table)
        return (
            (0, 0) if self._alignment.certain else (len(table), len(self.assembled.prepared.table))
        )

    def _tell_common(self) -> None:
        """Tells the person here how many of the party's rows are common to all, and whether these
        are few.
        """
        own, common = self._held
        if own:
            log.info(
                "%s", sentence(common, own), extra={"event": "aligned", "common": common, "of": own}
            )
            self._hooks.show("aligned", common=common, of=own)
            advise(self._hooks.show, few_common(self._opened.settings, common, own))

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


def new_secret() -> bytes:
    """Draws what a party's own seeds follow from in a new run."""
    return secrets.token_bytes(_BYTES)


def own_secret(folder: RunFolder, init: Init, fresh: bytes) -> int | None:
    """Returns the root of the seeds that only this party knows in a run, see ``Party``; the folder
    keeps it.

    A run goes on as it began, whatever ``init`` is by now. ``fresh``: the secret of a run that has
    none yet. Raises InputError if checkpoints rest on a secret that is not there.
    """
    # A prediction draws nothing.
    if folder.checkpoints is None:
        return None
    noted, begun, path = (
        folder.facts().get("init"),
        folder.checkpoints.saved() > 0,
        folder.path / INIT_SECRET,
    )
    # Releases without the key knew only the recipe's seed.
    now = noted or ("recipe" if begun else init)
    if now != init:
        log.warning(
            "%s: this run goes on as it began, with init = %r",
            folder.path,
            now,
            extra={"event": "init"},
        )
    if now == "secret" and begun and not path.exists():
        text = f"{path}: is missing, and the run's checkpoints rest on it; restore it"
        raise InputError(
            Code.FILE_INVALID,
            f"{text}, or begin a new run with --fresh at the server and every party",
        )
    secret = secret_seed(kept_secret(path, fresh)) if now == "secret" else None
    if noted is None:
        folder.note(init=now)
        log.info("%s", _SAID[now], extra={"event": "init", "init": now})
    return secret


class Jobs:
    """Makes the job of each generation.

    What can be refused without the others is refused here, before joining: the party is assembled
    with the rows that it expects. The first generation uses that party if its rows turn out to be
    these; every later one is made afresh, so that nothing survives a rollback.

    Args:
        opened: the party's data.
        alignment: how the rows are decided.
        assemble: makes the party of aligned rows and its secret seed, in this process alone.
        spread: makes it with the party's other processes; None if there are none.
        resume: the folder of the run to resume, which keeps its secret, and may keep what this
            party knows of its rows.
        secret: what its own seeds follow from in a new run, see ``new_secret``; None: the recipe's
            seed.
        complete: adds what only the party's program knows to what an alignment works with.
    """

    def __init__(
        self,
        opened: Opened,
        alignment: Alignment,
        assemble: Assemble,
        spread: Assemble | None = None,
        resume: RunFolder | None = None,
        complete: Callable[[Aligning], Aligning] = lambda at: at,
        secret: bytes | None = None,
    ) -> None:
        self._opened, self._alignment, self._assemble = opened, alignment, spread or assemble
        self._complete, self._fresh = complete, secret or new_secret()
        self._init: Init = "recipe" if secret is None else "secret"
        aligned = alignment.expected(opened.table)
        if aligned.division is None and resume is not None:
            aligned = aligned.with_kept(resume.path)
        seed = secret_seed(secret) if secret is not None else None
        tried = assemble(
            aligned, own_secret(resume, self._init, self._fresh) if resume is not None else seed
        )
        # So that the policy sees the alignment's, too, before anybody is asked.
        _ = tried.exchanges
        self._ready: tuple[Aligned, Assembled] | None = (aligned, tried)
        # If not, its memory is better used for the alignment.
        self._usable = spread is None and alignment.certain

    @property
    def expected(self) -> Assembled:
        """The party as it is before joining, until the first job is made."""
        assert self._ready is not None  # noqa: S101 - nobody asks later
        return self._ready[1]

    def make(self, folder: RunFolder, transport: Transport, hooks: Hooks) -> PartyJob:
        """Returns the job of the next generation."""
        ready, self._ready = self._ready if self._usable else None, None
        # Another run has another secret.
        fresh, self._fresh = self._fresh, new_secret()
        return PartyJob(
            self._opened,
            self._alignment,
            self._assemble,
            folder,
            transport,
            init=self._init,
            fresh=fresh,
            hooks=hooks,
            complete=self._complete,
            ready=ready,
        )
