"""Prepares a party before it joins, and manages its models, phases and connections in one
generation of a run.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from vfl_common.config.party import Init
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import load_or_create_secret
from vfl_common.process.logs import format_alignment as sentence
from vfl_common.rpc.messages import Joining, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import AggregationPlan, Planned
from vfl_party.align import AlignedRows, Alignment, AlignmentContext, make_alignment
from vfl_party.assembly.party import Assembled, OpenedParty, check_ranks
from vfl_party.base.devices import get_device_name
from vfl_party.base.phase import Phase, Predictions, Tree
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.base.seeds import secret_seed
from vfl_party.base.step_timing import Clock
from vfl_party.data.inputs import profile
from vfl_party.models import StochasticEncoder
from vfl_party.outbound.exchange import Connections
from vfl_party.outbound.policies import Policy
from vfl_party.phases.advice import advise, warn_few_common
from vfl_party.phases.context import Hooks
from vfl_party.phases.measure import get_threshold
from vfl_party.policy.meeting import RunGuard, check_tables, render_guards
from vfl_party.predict.results import id_names, keep, make_prediction_table
from vfl_party.runtime.joining import check_before, check_epochs, joining_of

log = logging.getLogger(__name__)

KEPT_SECRET = "noise-secret"  # noqa: S105 - the file with the secret of an encoder that draws; the same in all generations
INIT_SECRET = "init-secret"  # noqa: S105 - the file with the secret of the party's own seeds; the same in all generations
# The length of the secret in INIT_SECRET.
_SECRET_BYTES = 32

# Assembles the party from the aligned rows and the root of its secret seeds.
Assemble = Callable[[AlignedRows, int | None], Assembled]
_INIT_TEXTS = {
    "secret": "initial weights and what else this party draws are secret",
    "recipe": "initial weights and what else this party draws follow from the recipe's seed, which "
    "all parties know",
}


class Transport(Connections, Protocol):
    """The connections of one generation to the peers, which ``transport`` makes over gRPC.

    ``clock``: Measures the time that the party waits for peers.
    """

    clock: Clock

    def end(self, error: VflError) -> None:
        """Wakes every waiting call with ``error``; any thread may call this."""
        ...

    def close(self, error: BaseException | None) -> None:
        """Closes the exchange and sends ``error``, if any, to the peers."""
        ...

    def confer(self, *, once: bool = False) -> None:
        """Exchanges the heads of the records with the active party; see ``vfl_party.record.heads``.
        ``once``: Whether to exchange them only if data have been sent since the last exchange. Then
        a peer that does not answer is not an error.

        Raises PeerError if the active party's record does not continue from the head that this
        party has stored.
        """
        ...


@dataclass(frozen=True)
class Statement:
    """The facts about this party's part in a generation, which follow from its rows, models and
    phases.

    ``plan``: The phases, in order. ``aggregations``: The weights that the server averages.
    ``privacy_json``, ``exchanges_json``: The summary's sections about differential privacy and
    exchanges, from the active party. ``data``: A digest of this party's aligned rows. ``rows``,
    ``common_rows``, ``follows_preset``: See ``PartyReport``.
    """

    plan: Sequence[Planned]
    aggregations: Sequence[AggregationPlan] = ()
    privacy_json: str = ""
    exchanges_json: str = ""
    data: str = ""
    rows: int = 0
    common_rows: int = 0
    follows_preset: bool = False


@dataclass(frozen=True)
class AlignmentCalls:
    """What a party's program does when rows are aligned.

    Args:
        complete: Adds facts that only the program knows to the context of an alignment.
        when_aligned: Called with the ids of the common rows before any data of these rows are sent.
            It may raise VflError.
    """

    complete: Callable[[AlignmentContext], AlignmentContext] = lambda at: at
    when_aligned: Callable[[Sequence[str]], None] = lambda _ids: None


class Generation:
    """Holds a party's models, phases and connections in one generation of a run.

    Args:
        opened: The party's data.
        alignment: Finds the rows that the parties have in common.
        assemble: Assembles the party from the aligned rows.
        folder: The run's folder.
        transport: The connections to the peers in this generation.
        hooks: The callbacks for phases.
        calls: What the party's program does when rows are aligned.
    """

    def __init__(
        self,
        opened: OpenedParty,
        alignment: Alignment,
        assemble: Callable[[AlignedRows], Assembled],
        folder: RunFolder,
        transport: Transport,
        hooks: Hooks,
        calls: AlignmentCalls,
    ) -> None:
        self._opened, self._alignment, self._assemble = opened, alignment, assemble
        self._folder, self._transport, self._hooks = folder, transport, hooks
        self._calls = calls
        self._aligned: AlignedRows | None = None
        self._assembled: Assembled | None = None

    @property
    def assembled(self) -> Assembled:
        """The assembled party, once the generation is open."""
        assert self._assembled is not None  # noqa: S101 - a run opens it before anything else
        return self._assembled

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases to run, once the generation is open."""
        return self.assembled.phases

    def open(self, *, returning: bool) -> None:
        """Aligns the rows with the peers', makes models and phases, and connects them.

        ``returning``: Whether the other parties have aligned and continued. Then this party uses
        the rows that it had before.
        """
        opened, transport = self._opened, self._transport
        context, record = self._alignment_context, transport.record
        # The heads of the records are exchanged before any data are sent.
        transport.confer()
        if record is not None:
            record.people(opened.table.ids, "table")
        if returning:
            aligned = self._alignment.get_agreed(context)
        else:
            aligned = self._alignment.align(self._calls.complete(context))
            if opened.name != opened.recipe.active.name:
                aligned.save(self._folder.path)
        self._aligned = aligned
        self._calls.when_aligned(aligned.ids)
        if record is not None:
            record.people(self._yield_ids(aligned), "aligned")
        self._assembled = self._assemble(aligned)
        if not returning:
            self._report_common_rows()
        encoder = self._assembled.party.models.get("encoder")
        if isinstance(encoder, StochasticEncoder) and self._folder.checkpoints is not None:
            encoder.keep_secret(self._folder.path / KEPT_SECRET)
        if self._folder.checkpoints is not None:
            for phase in self._assembled.phases:
                with name_plugin_errors():
                    phase.keep(self._folder.path)
        self._assembled.connect(transport, self._hooks)

    def _yield_ids(self, aligned: AlignedRows) -> Iterator[str]:
        """Yields the ids of the rows that phases use, in the order of their row numbers."""
        yield from aligned.get_own_ids(self._opened.table)
        if self._opened.work.job == "train":
            for more in (aligned.rest(self._opened.table), self._opened.unaligned):
                yield from more.ids if more is not None else ()

    def confer(self) -> None:
        """Asks the peers to sign the head of this party's record, if data have been sent since the
        last time.
        """
        self._transport.confer(once=True)

    @property
    def _alignment_context(self) -> AlignmentContext:
        """The context of an alignment in this generation."""
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
        """Proves to the active party that this returning party still has the same rows."""
        assert self._aligned is not None  # noqa: S101 - a run opens it before anything else
        self._alignment.show(self._alignment_context, self._aligned)

    @property
    def statement(self) -> Statement:
        """This party's plan, for the server and the summary, once the generation is open."""
        party = self.assembled
        lines = (
            [line.model_dump() for line in party.exchanges] if party.party.role == "active" else []
        )
        data = party.prepared.fingerprint
        rows, common = self._row_counts
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
    def _row_counts(self) -> tuple[int, int]:
        """The number of this party's rows, and the number that all parties have; (0, 0) if no
        alignment was needed.
        """
        table = self._opened.table
        # If the tables were joined on this machine, the counts are known from the join.
        if self._opened.settings.in_common and table.counts is not None:
            return table.counts.remaining, len(table)
        return (
            (0, 0) if self._alignment.certain else (len(table), len(self.assembled.prepared.table))
        )

    def _report_common_rows(self) -> None:
        """Reports to the user how many of the party's rows are common to all, with a warning if
        these are few.
        """
        own_rows, common = self._row_counts
        if own_rows:
            active = self._opened.recipe.active.name
            by = self._aligned.by(self._opened.name, active) if self._aligned is not None else ""
            facts: dict[str, Any] = {"common": common, "of": own_rows} | ({"by": by} if by else {})
            text = sentence(common, own_rows, by)
            log.info("%s", text, extra={"event": "aligned", **facts})
            self._hooks.show("aligned", **facts)
            advise(self._hooks.show, warn_few_common(self._opened.settings, common, own_rows))

    def unhurried(self) -> None:
        """Lets the next exchange wait as long as the peers are connected, because they may still be
        computing alone.
        """
        self.assembled.party.exchanges.connections.unhurried()

    def settle(self) -> None:
        """Waits until the parties that were away in the last phase know that the phase is over. See
        ``Hub.settle``.
        """
        if self._transport.hub is not None:
            self._transport.hub.settle()

    def state(self) -> Tree:
        """Returns the state of the models, the preprocessing and torch's random generators."""
        return self.assembled.state()

    def load_state(self, tree: Tree) -> None:
        """Restores what ``state`` returned."""
        self.assembled.load_state(tree)

    def keep(self, folder: Path, phase: str, predictions: Predictions) -> None:
        """Writes a phase's predictions into the folder of the run, with ids and labels. Raises
        InputError.
        """
        assembled, ids = self.assembled, id_names(self._opened.settings)
        party = assembled.party
        table = make_prediction_table(
            party.recipe, ids, assembled.prepared, phase, predictions, get_threshold(party)
        )
        keep(folder, phase, table)

    @property
    def label_noted(self) -> dict[str, str]:
        """The entry of ``run.json`` about the label column. Empty except at the active party in
        training.
        """
        opened = self._opened
        label = ", ".join(opened.settings.labels) or opened.settings.label
        is_trained_active = self.assembled.party.role == "active" and opened.work.job == "train"
        return {"label": label} if is_trained_active and label is not None else {}

    def keep_profile(self, folder: Path) -> None:
        """Writes the distribution of the training rows' columns, unless the file exists. New rows
        are compared with it. Raises InputError.
        """
        prepared = self.assembled.prepared
        tabular = prepared.preprocessor is not None and prepared.table.images_NCHW is None
        if self._opened.work.job != "train" or not tabular or (folder / profile.FILE).exists():
            return
        rows = prepared.splits["local"]
        # Row numbers beyond the table belong to rows that only this party has.
        table_rows = rows[rows < len(prepared.table)]
        profile.save(folder, profile.profile_of(prepared.table, table_rows))

    def end(self, error: VflError) -> None:
        """Wakes the main thread with ``error`` if it waits for a peer; any thread may call this."""
        self._transport.end(error)

    def close(self, error: BaseException | None) -> None:
        """Closes the exchange and sends ``error``, if any, to the peers."""
        self._transport.close(error)


def new_secret() -> bytes:
    """Draws the secret from which a party's own seeds are derived in a new run."""
    return secrets.token_bytes(_SECRET_BYTES)


def load_own_secret(folder: RunFolder, init: Init, fresh: bytes) -> int | None:
    """Returns the root of the seeds that only this party knows in a run; None if its seeds follow
    from the recipe. See ``Party``. The secret is stored in the run's folder.

    A run keeps the ``init`` that it began with. ``fresh``: The secret for a run that has none yet.
    Raises InputError if checkpoints depend on a secret whose file is missing.
    """
    # A prediction draws no random numbers.
    if folder.checkpoints is None:
        return None
    noted_init, has_checkpoints, path = (
        folder.facts().get("init"),
        folder.checkpoints.count_saved() > 0,
        folder.path / INIT_SECRET,
    )
    # Earlier releases without the key ``init`` used only the recipe's seed.
    run_init = noted_init or ("recipe" if has_checkpoints else init)
    if run_init != init:
        log.warning(
            "%s: this run continues with the init that it began with, init = %r",
            folder.path,
            run_init,
            extra={"event": "init"},
        )
    if run_init == "secret" and has_checkpoints and not path.exists():
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: the file is missing, and the run's checkpoints depend on it. Restore it, "
            "or begin a new "
            "run with --fresh at the server and every party.",
        )
    secret = secret_seed(load_or_create_secret(path, fresh)) if run_init == "secret" else None
    if noted_init is None:
        folder.note(init=run_init)
        log.info("%s", _INIT_TEXTS[run_init], extra={"event": "init", "init": run_init})
    return secret


@dataclass(frozen=True)
class Processes:
    """The processes in which a party computes.

    Args:
        device: The device on which this process computes.
        assemble: Assembles the party from aligned rows and its secret seed, in this process alone.
        count: The number of processes.
        spread: Assembles the party over all of its processes; None if it has one process.
        compare: Makes the other processes read the party's table and compares the tables. May raise
            InputError.
    """

    device: torch.device
    assemble: Assemble
    count: int = 1
    spread: Assemble | None = None
    compare: Callable[[AlignedRows, Assembled], None] = lambda _aligned, _assembled: None


class Preparation:
    """Prepares a party before it joins, and makes each of its generations.

    The party is assembled with the rows that it expects, so that errors which need no other party
    are raised here. The first generation uses that assembled party if the aligned rows are the
    expected rows. Every later generation assembles the party again, so that no state survives a
    rollback.

    Args:
        opened: The party's data.
        processes: The processes in which the party computes.
        plugins: {name: version} of this party's plug-ins that other parties need too; see
            ``vfl_party.runtime.versions``.
        policy: Decides what the party may send.
        resume: The folder of the run to resume. It contains the run's secret and perhaps the
            division of this party's rows.
        secret: The secret from which the party's own seeds are derived in a new run, see
            ``new_secret``. None to derive them from the recipe's seed.
        calls: What the party's program does when rows are aligned.
        guards: Check the run before the party joins, and again when all parties have joined.
    """

    def __init__(
        self,
        opened: OpenedParty,
        processes: Processes,
        plugins: Mapping[str, str],
        *,
        policy: Policy | None = None,
        resume: RunFolder | None = None,
        secret: bytes | None = None,
        calls: AlignmentCalls | None = None,
        guards: Sequence[RunGuard] = (),
    ) -> None:
        self.device, self._calls, self._guards = processes.device, calls, guards
        self._opened, self._processes, self._plugins = opened, processes, plugins
        self._fresh = secret or new_secret()
        self._init: Init = "recipe" if secret is None else "secret"
        self._alignment = make_alignment(
            opened.recipe,
            policy,
            divides=opened.divides,
            trained_folder=opened.work.trained_folder,
        )
        aligned = self._alignment.get_expected(opened.table)
        if aligned.division is None and resume is not None:
            aligned = aligned.with_saved_division(resume.path)
        seed = secret_seed(secret) if secret is not None else None
        tried = processes.assemble(
            aligned,
            load_own_secret(resume, self._init, self._fresh) if resume is not None else seed,
        )
        if processes.spread is not None:
            check_ranks(tried.party, trains=opened.work.job == "train")
            processes.compare(aligned, tried)
        # Reading the exchanges makes the policy check them before the party joins.
        _ = tried.exchanges
        self.plan: Sequence[Planned] = tried.plan
        check_before(guards, tried)
        self._ready = [(aligned, tried)]
        # An assembled party that cannot be reused is dropped, which frees memory for the alignment.
        self._usable = processes.spread is None and self._alignment.certain

    def joining(self, address: str) -> Joining:
        """Returns the contents of this party's Join message. ``address``: The address at which
        passive parties reach this party; '' if this party does not listen.
        """
        opened = self._opened
        place = opened.recipe.party(opened.name)
        assert place is not None  # noqa: S101 - the party's data were opened by its place in the recipe
        count = self._processes.count
        device = str(self.device) if count == 1 else f"{count} x {self.device.type}"
        return replace(
            joining_of(opened.course, place.role, self._plugins),
            job=opened.work.job,
            pid=os.getpid(),
            device=device,
            device_name=get_device_name(self.device),
            run_id=opened.work.run_id,
            exchange_address=address,
            shown_json=render_guards(self._guards),
        )

    def meet(self, start: Start) -> dict[str, dict[str, Any]]:
        """Checks the policies and grants of all parties before any data are sent, and returns them.
        Raises InputError (REFUSED) and PeerError.
        """
        return check_tables(self._guards, start.run_id, start.shown)

    def _assemble(
        self,
        folder: RunFolder,
        fresh: bytes,
        ready: list[tuple[AlignedRows, Assembled]],
        aligned: AlignedRows,
    ) -> Assembled:
        """Assembles the party from the aligned rows, or takes the party of ``ready`` if it is the
        same. Raises InputError (REFUSED) if training on these rows takes more epochs than the
        policy allows.
        """
        secret = load_own_secret(folder, self._init, fresh)
        expected, tried = ready.pop() if ready else (None, None)
        if tried is not None and aligned == expected and tried.party.terms.secret == secret:
            return tried
        assemble = self._processes.spread or self._processes.assemble
        assembled = assemble(aligned, secret)
        check_epochs(self._guards, assembled)
        return assembled

    def generation(self, folder: RunFolder, transport: Transport, hooks: Hooks) -> Generation:
        """Makes the next generation."""
        ready, self._ready = self._ready if self._usable else [], []
        # The next run gets a new secret.
        fresh, self._fresh = self._fresh, new_secret()
        assemble, calls = partial(self._assemble, folder, fresh, ready), self._calls
        return Generation(
            self._opened,
            self._alignment,
            assemble,
            folder,
            transport,
            hooks,
            calls if calls is not None else AlignmentCalls(),
        )
