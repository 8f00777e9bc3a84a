"""A party's part in one run: its jobs, its session with the server, its progress and its runner,
put together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from vfl_common.config.recipe import Recipe
from vfl_common.link import OLDEST
from vfl_common.process.logs import Console, version
from vfl_common.rpc.messages import Joining, Membership, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import Planned
from vfl_party.align import alignment_of
from vfl_party.assembly.party import Training, load_encoder
from vfl_party.base.devices import device_name, peak_memory
from vfl_party.methods import filled, oldest_protocol
from vfl_party.phases.context import Hooks
from vfl_party.predict.prediction import load_start
from vfl_party.runtime.job import Jobs, PartyJob, Transport
from vfl_party.runtime.progress import Progress
from vfl_party.runtime.runner import Outcome, Runner

JobName = Literal["train", "predict"]


def training(recipe: Recipe, name: str, out: Path) -> Training:
    """Prepares training from the beginning, or with the encoder of an earlier run in ``out``.
    Raises InputError.
    """
    start = load_start(recipe, name, out)
    if start is None or recipe.start is None:
        return Training(recipe)
    begin = partial(load_encoder, tree=start.state, run_id=start.run_id, tower=recipe.start.tower)
    return Training(recipe, begin)


def joining_of(recipe: Recipe, role: str, plugins: Mapping[str, str]) -> Joining:
    """Returns what the server compares when a party joins; ``plugins``: those that others have
    too.
    """
    spelling = filled(recipe)
    return Joining(
        role=role,
        recipe_json=recipe.canonical_json(),
        job="train",
        pid=0,
        device="",
        plugins=plugins,
        filled_json=json.dumps(spelling.filled, sort_keys=True, separators=(",", ":")),
        written=tuple(sorted(spelling.written)),
        oldest=max(OLDEST, oldest_protocol(recipe), alignment_of(recipe).protocol),
        version=version(),
    )


@dataclass
class Part:
    """One party in one run.

    Args:
        job: training or prediction.
        plugins: those of this party that others have too; see ``vfl_party.runtime.versions``.
        trained: the trained run, for a prediction; '' for training.
        device: where this party computes, and ``devices`` in words, if it is more than one.
        address: where passive parties reach this party; '' if they do not.
        transport: makes the links and the hub of a generation.
        begun: called with each generation and the run's folder, before anything else of it.
    """

    recipe: Recipe
    name: str
    job: JobName
    session: Membership
    jobs: Jobs
    progress: Progress
    console: Console
    device: torch.device
    transport: Callable[[Start], Transport]
    open_folder: Callable[[str], RunFolder]
    plugins: Mapping[str, str] = field(default_factory=dict)
    trained: str = ""
    devices: str = ""
    address: str = ""
    begun: Callable[[Start, RunFolder], None] = lambda _start, _folder: None
    plan: Sequence[Planned] = ()
    resume: RunFolder | None = None
    finished: Callable[[str], RunFolder | None] = lambda _run_id: None
    checkpoint_every: int = 1

    def run(self) -> tuple[Outcome, RunFolder]:
        """Takes part in the run to its end. Raises VflError, after the server was informed of
        it.
        """
        settings = self.recipe.party(self.name)
        assert settings is not None  # noqa: S101 - the party's data were opened by its place in the recipe
        joining = replace(
            joining_of(self.recipe, settings.role, self.plugins),
            job=self.job,
            pid=os.getpid(),
            device=self.devices or str(self.device),
            device_name=device_name(self.device),
            run_id=self.trained,
            exchange_address=self.address,
        )
        runner = Runner(
            self.session,
            joining,
            self._make_job,
            self.open_folder,
            self.session.ledger,
            checkpoint_every=self.checkpoint_every,
            observe=self.progress.observe,
            begin_round=self.progress.begin_round,
            plan=self.plan,
            resume=self.resume,
            finished=self.finished,
            show=self.console.show,
            peak_memory=lambda: peak_memory(self.device),
            times=self.progress.clock.times,
        )
        try:
            return runner.run()
        finally:
            self.session.close()

    def _make_job(self, start: Start, folder: RunFolder) -> PartyJob:
        self.begun(start, folder)
        self.progress.begin(folder.path / "metrics.jsonl", start)
        hooks = Hooks(self._tick, self.session.lenient, self.console.show)
        transport = self.transport(start)
        transport.clock = self.progress.clock
        return self.jobs.make(folder, transport, hooks)

    def _tick(self, phase: str, round_: int, rounds: int, batch: int, batches: int) -> None:
        # So that a party at work on its own notices an interruption too.
        self.session.check()
        self.progress.tick(phase, round_, rounds, batch, batches)
