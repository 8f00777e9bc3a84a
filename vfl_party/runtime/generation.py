"""What a party works with in one generation of a run, and its preparation before it joins."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from vfl_common.config.party import Init
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import load_or_create_secret
from vfl_common.process.logs import alignment_text as sentence
from vfl_common.rpc.messages import Joining, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import AggregationPlan, Planned
from vfl_party.align import AlignedRows, Alignment, AlignmentContext, alignment_of
from vfl_party.assembly.party import Assembled, OpenedParty, check_ranks
from vfl_party.base.devices import device_name
from vfl_party.base.phase import Phase, Predictions, Tree
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.base.seeds import secret_seed
from vfl_party.base.step_timing import Clock
from vfl_party.data.inputs import profile
from vfl_party.models import StochasticEncoder
from vfl_party.outbound.exchange import Connections
from vfl_party.outbound.policies import Policy
from vfl_party.phases.advice import advise, few_common
from vfl_party.phases.context import Hooks
from vfl_party.phases.measure import decides
from vfl_party.policy.meeting import RunGuard, check_tables, render_guards
from vfl_party.predict.results import id_names, keep, make_prediction_table
from vfl_party.runtime.joining import check_before, check_epochs, joining_of

log = logging.getLogger(__name__)

KEPT_SECRET = "noise-secret"  # noqa: S105 - a file: of an encoder that draws, the same in all generations
INIT_SECRET = "init-secret"  # noqa: S105 - a file: what a party's own seeds follow from, the same in all generations
# Of that secret.
_BYTES = 32

# From the rows, and the root of the party's secret seeds.
Assemble = Callable[[AlignedRows, int | None], Assembled]
_SAID = {
    "secret": "initial weights and what else this party draws are secret",
    "recipe": "initial weights and what else this party draws follow from the recipe's seed, which "
    "all parties know",
}


class Transport(Connections, Protocol):
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

    def confer(self, *, once: bool = False) -> None:
        """Shows the active party the head of this party's record, and takes its head; see
        ``vfl_party.record.heads``. ``once``: only if something has left since, and a peer that does
        not answer is no error.

        Raises PeerError if the active party's record does not go on from the head that is held.
        """
        ...


@dataclass(frozen=True)
class Statement:
    """The facts that follow from rows, models and phases.

    ``plan``: the phases, in order. ``aggregations``: the weights that are swapped with the server.
    ``privacy_json``, ``exchanges_json``: the summary's parts about differential privacy and
    exchanges, from the active party. ``data``: a digest of this party's aligned rows. ``rows``,
    ``common_rows``, ``follows_preset``: see ``PartyReport``.
    """

    plan: Sequence[Planned]
    aggregations: Sequence[AggregationPlan] = ()
    privacy_json: str = ""
    exchanges_json: str = ""
    data: str = ""
    rows: int = 0
    common_rows: int = 0
    follows_preset: bool = False


class Generation:
    """Holds what one generation of a run works with: models in their initial state, phases, the
    exchange.

    Args:
        opened: the party's data.
        alignment: decides the rows.
        assemble: assembles the party from the aligned rows and its secret seed.
        folder: of the run.
        transport: of this generation.
        init: what its own seeds follow from, if the run's folder does not say so; ``fresh``: a
            secret for a new run.
        hooks: what phases call.
        complete: adds what only the party's program knows to what an alignment works with.
        when_aligned: hears the ids of the rows that all hold, before anything of them leaves; it
            may raise VflError.
        ready: the expected rows, and the party as it was assembled from them before joining; None
            if an earlier generation used it.
    """

    def __init__(
        self,
        opened: OpenedParty,
        alignment: Alignment,
        assemble: Assemble,
        folder: RunFolder,
        transport: Transport,
        *,
        init: Init,
        fresh: bytes,
        hooks: Hooks,
        complete: Callable[[AlignmentContext], AlignmentContext],
        when_aligned: Callable[[Sequence[str]], None] = lambda _ids: None,
        ready: tuple[AlignedRows, Assembled] | None = None,
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
        self._when_aligned = when_aligned
        self._aligned: AlignedRows | None = None
        self._assembled: Assembled | None = None

    @property
    def assembled(self) -> Assembled:
        """The party, once the generation is open."""
        assert self._assembled is not None  # noqa: S101 - a run opens it before anything else
        return self._assembled

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases to run, once the generation is open."""
        return self.assembled.phases

    def open(self, *, returning: bool) -> None:
        """Aligns the rows with the peers', makes models and phases, and connects them.

        ``returning``: the others have aligned, and go on; this party takes the rows that it had.
        """
        opened, transport = self._opened, self._transport
        (expected, ready), self._ready = self._ready or (None, None), None
        at, record = self._aligning, transport.record
        # Before anything leaves.
        transport.confer()
        if record is not None:
            record.people(opened.table.ids, "table")
        if returning:
            aligned = self._alignment.get_agreed(at)
        else:
            aligned = self._alignment.align(self._complete(at))
            if opened.name != opened.recipe.active.name:
                aligned.save(self._folder.path)
        self._aligned = aligned
        self._when_aligned(aligned.ids)
        if record is not None:
            record.people(self._people(aligned), "aligned")
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
                with name_plugin_errors():
                    phase.keep(self._folder.path)
        self._assembled.connect(transport, self._hooks)

    def _people(self, aligned: AlignedRows) -> Iterator[str]:
        """Yields the ids of the rows that phases work with, in the order of their numbers."""
        yield from aligned.ids
        if self._opened.work.job == "train":
            for more in (aligned.rest(self._opened.table), self._opened.unaligned):
                yield from more.ids if more is not None else ()

    def confer(self) -> None:
        """Has the peers sign the head of this party's record, if something has left since."""
        self._transport.confer(once=True)

    @property
    def _aligning(self) -> AlignmentContext:
        """What an alignment works with in this generation."""
        return AlignmentContext(
            self._opened.name,
            self._folder.run_id,
            self._opened.table,
            self._folder.path,
            self._transport,
            show=self._hooks.show,
            tick=self._hooks.tick,
        )

    def show_rows(self) -> None:
        """Shows the active party, which goes on, that the rows of this party, which returns, are
        those that it had.
        """
        assert self._aligned is not None  # noqa: S101 - a run opens it before anything else
        self._alignment.show(self._aligning, self._aligned)

    @property
    def statement(self) -> Statement:
        """This party's plan, for the server and the summary, once the generation is open."""
        party = self.assembled
        lines = (
            [line.model_dump() for line in party.exchanges] if party.party.role == "active" else []
        )
        data = party.prepared.fingerprint
        rows, common = self._held
        return Statement(
            party.plan,
            party.aggregations,
            party.privacy_json,
            json.dumps(lines),
            data,
            rows,
            common,
            party.party.role == "active" and party.party.course.follows_preset,
        )

    @property
    def _held(self) -> tuple[int, int]:
        """How many rows this party holds, and how many of them all do; (0, 0) if nobody had to find
        these.
        """
        table = self._opened.table
        # Tables that were joined here have counted them.
        if self._opened.settings.in_common and table.counts is not None:
            return table.counts.remaining, len(table)
        return (
            (0, 0) if self._alignment.certain else (len(table), len(self.assembled.prepared.table))
        )

    def _tell_common(self) -> None:
        """Tells the person here how many of the party's rows are common to all, and whether these
        are few.
        """
        own, common = self._held
        if own:
            active = self._opened.recipe.active.name
            by = self._aligned.by(self._opened.name, active) if self._aligned is not None else ""
            facts: dict[str, Any] = {"common": common, "of": own} | ({"by": by} if by else {})
            text = sentence(common, own, by)
            log.info("%s", text, extra={"event": "aligned", **facts})
            self._hooks.show("aligned", **facts)
            advise(self._hooks.show, few_common(self._opened.settings, common, own))

    def unhurried(self) -> None:
        """Lets the next exchange wait as long as the peers live: they may be at work on their
        own.
        """
        self.assembled.party.unhurried()

    def settle(self) -> None:
        """Waits until the parties that were away in the last phase know that it is over. See
        ``Hub.settle``.
        """
        if self._transport.hub is not None:
            self._transport.hub.settle()

    def state(self) -> Tree:
        """Returns models, preprocessing, torch's generators."""
        return self.assembled.state()

    def load_state(self, tree: Tree) -> None:
        """Restores what ``state`` returned."""
        self.assembled.load_state(tree)

    def keep(self, folder: Path, phase: str, predictions: Predictions) -> None:
        """Writes a phase's predictions into the folder of the run, with ids and labels. Raises
        InputError.
        """
        made, ids = self.assembled, id_names(self._opened.settings)
        party = made.party
        table = make_prediction_table(
            party.recipe, ids, made.prepared, phase, predictions, decides(party)
        )
        keep(folder, phase, table)

    @property
    def label_noted(self) -> dict[str, str]:
        """What ``run.json`` says of the label's column: only the active party of a training has
        one.
        """
        opened = self._opened
        label = ", ".join(opened.settings.labels) or opened.settings.label
        named = self.assembled.party.role == "active" and opened.work.job == "train"
        return {"label": label} if named and label is not None else {}

    def keep_profile(self, folder: Path) -> None:
        """Writes how the columns of the training rows are spread, unless it is there: for new rows
        to be compared with. Raises InputError.
        """
        prepared = self.assembled.prepared
        tabular = prepared.preprocessor is not None and prepared.table.images_NCHW is None
        if self._opened.work.job != "train" or not tabular or (folder / profile.FILE).exists():
            return
        rows = prepared.splits["local"]
        # Those that only this party has come after the table's.
        own = rows[rows < len(prepared.table)]
        profile.save(folder, profile.profile_of(prepared.table, own))

    def end(self, error: VflError) -> None:
        """Wakes the main thread with ``error`` if it waits for a peer; any thread may call this."""
        self._transport.end(error)

    def close(self, error: BaseException | None) -> None:
        """Closes the exchange and sends ``error``, if any, to the peers."""
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
        folder.checkpoints.count_saved() > 0,
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
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is missing, and the run's checkpoints rest on it. Restore it, or begin a new "
            "run with --fresh at the server and every party.",
        )
    secret = secret_seed(load_or_create_secret(path, fresh)) if now == "secret" else None
    if noted is None:
        folder.note(init=now)
        log.info("%s", _SAID[now], extra={"event": "init", "init": now})
    return secret


class Preparation:
    """A party before it joins, and what makes each of its generations.

    What can be refused without the others is refused here: the party is assembled with the rows
    that it expects. The first generation uses that party if its rows turn out to be these; every
    later one is made afresh, so that nothing survives a rollback.

    Args:
        opened: the party's data.
        assemble: makes the party of aligned rows and its secret seed, in this process alone.
        plugins: those of this party that others have too; see ``vfl_party.runtime.versions``.
        device: where this party computes.
        policy: decides what may leave the party.
        ranks: how many processes the party has.
        spread: makes the party with its other processes; None if there are none.
        compare: has the other processes read the party's table, and compares; may raise InputError.
        resume: the folder of the run to resume, which keeps its secret, and may keep what this
            party knows of its rows.
        secret: what its own seeds follow from in a new run, see ``new_secret``; None: the recipe's
            seed.
        complete: adds what only the party's program knows to what an alignment works with.
        when_aligned: see ``Generation``.
        guards: check the run before the party joins, and when all have.
    """

    def __init__(
        self,
        opened: OpenedParty,
        assemble: Assemble,
        plugins: Mapping[str, str],
        device: torch.device,
        *,
        policy: Policy | None = None,
        ranks: int = 1,
        spread: Assemble | None = None,
        compare: Callable[[AlignedRows, Assembled], None] = lambda _aligned, _assembled: None,
        resume: RunFolder | None = None,
        secret: bytes | None = None,
        complete: Callable[[AlignmentContext], AlignmentContext] = lambda at: at,
        when_aligned: Callable[[Sequence[str]], None] = lambda _ids: None,
        guards: Sequence[RunGuard] = (),
    ) -> None:
        self.device, self._when_aligned, self._guards = device, when_aligned, guards
        self._opened, self._assemble, self._complete = opened, spread or assemble, complete
        self._plugins, self._ranks = plugins, ranks
        self._fresh = secret or new_secret()
        self._init: Init = "recipe" if secret is None else "secret"
        self._alignment = alignment_of(opened.recipe, policy, divides=opened.divides)
        aligned = self._alignment.get_expected(opened.table)
        if aligned.division is None and resume is not None:
            aligned = aligned.with_kept(resume.path)
        seed = secret_seed(secret) if secret is not None else None
        tried = assemble(
            aligned, own_secret(resume, self._init, self._fresh) if resume is not None else seed
        )
        if spread is not None:
            check_ranks(tried.party, trains=opened.work.job == "train")
            compare(aligned, tried)
        # So that the policy sees the alignment's, too, before anybody is asked.
        _ = tried.exchanges
        self.plan: Sequence[Planned] = tried.plan
        check_before(guards, tried)
        self._ready: tuple[AlignedRows, Assembled] | None = (aligned, tried)
        # If not, its memory is better used for the alignment.
        self._usable = spread is None and self._alignment.certain

    def joining(self, address: str) -> Joining:
        """Returns what this party says when it joins. ``address``: where passive parties reach it;
        '' if they do not.
        """
        opened = self._opened
        place = opened.recipe.party(opened.name)
        assert place is not None  # noqa: S101 - the party's data were opened by its place in the recipe
        device = str(self.device) if self._ranks == 1 else f"{self._ranks} x {self.device.type}"
        return replace(
            joining_of(opened.course, place.role, self._plugins),
            job=opened.work.job,
            pid=os.getpid(),
            device=device,
            device_name=device_name(self.device),
            run_id=opened.work.run_id,
            exchange_address=address,
            shown_json=render_guards(self._guards),
        )

    def meet(self, start: Start) -> dict[str, dict[str, Any]]:
        """Checks what all parties show each other, before anything leaves, and returns it. Raises
        InputError (REFUSED), PeerError.
        """
        return check_tables(self._guards, start.run_id, start.shown)

    def _assemble_checked(self, aligned: AlignedRows, secret: int | None) -> Assembled:
        """Assembles the party from the aligned rows. Raises InputError (REFUSED) if these rows make
        more epochs than the policy allows.
        """
        assembled = self._assemble(aligned, secret)
        check_epochs(self._guards, assembled)
        return assembled

    def generation(self, folder: RunFolder, transport: Transport, hooks: Hooks) -> Generation:
        """Makes the next generation."""
        ready, self._ready = self._ready if self._usable else None, None
        # Another run has another secret.
        fresh, self._fresh = self._fresh, new_secret()
        return Generation(
            self._opened,
            self._alignment,
            self._assemble_checked,
            folder,
            transport,
            init=self._init,
            fresh=fresh,
            hooks=hooks,
            complete=self._complete,
            when_aligned=self._when_aligned,
            ready=ready,
        )
