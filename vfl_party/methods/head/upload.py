"""The single upload: a passive party sends its representations and may then leave, if no phase
follows. The active party acknowledges them once a checkpoint contains them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.models import GbdtTop
from vfl_common.config.recipe import Recipe
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.head.settings import TRAIN, UPLOAD, HeadSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, Traffic, f32, noise, u8
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import embed
from vfl_party.phases.sets import check as check_sets


def declare_upload(settings: HeadSettings, how: str) -> Exchange:
    """Declares the upload of a party's representations. With a deadline, the active party answers
    whether it uses them. ``how``: see ``Sent``.
    """
    up = Sent(
        Kind.EMBEDDING,
        {"z": f32("rows", "width")},
        noise("gaussian", sigma=settings.noise),
        how=how,
    )
    down = (
        NOTHING if settings.deadline_s is None else Sent(Kind.ACK, {"used": u8(1)}, label_free=True)
    )
    return Exchange("upload", up, down, when="once")


def get_upload_splits(recipe: Recipe) -> tuple[str, ...]:
    """Returns the splits whose representations are uploaded, in order: the training rows, and the
    validation rows if the trees' early stopping needs them.
    """
    top = recipe.model.top
    stops_early = isinstance(top, GbdtTop) and top.early_stopping is not None
    return ("train", "validation") if stops_early else ("train",)


def traffic(party: Party, name: str, settings: HeadSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    exchange, step = declare_upload(settings, party.course.protected), StepKey(name, UPLOAD, 0)
    rows = np.concatenate(
        [party.rows.get_joint(split) for split in get_upload_splits(party.recipe)]
    )
    return Traffic(
        party.exchanges.list_joint_occurrences(exchange, step, rows), bound=party.exchanges.bound
    )


@torch.no_grad()
def zero_late_weights(top: nn.Module, recipe: Recipe, late: Sequence[str]) -> None:
    """Sets to zero the weights of a top model's first layer for the representations of the ``late``
    parties.
    """
    if not late:
        return
    first_layer = next(module for module in top.modules() if isinstance(module, nn.Linear))
    order = [
        *([recipe.active.name] if recipe.active.features else []),
        *(party.name for party in recipe.passives),
    ]
    for name in late:
        start = sum(recipe.embedding_size(party) for party in order[: order.index(name)])
        first_layer.weight[:, start : start + recipe.embedding_size(name)] = 0.0


def make_zeros(late: Sequence[str], n: int, party: Party) -> dict[str, Tensor]:
    """Returns {late party: zeros [n, D]} on the device of ``party``."""
    widths = party.exchanges.widths
    return {name: torch.zeros(n, widths[name], device=party.device) for name in late}


class Uploads:
    """The active party's side of the upload.

    ``by_party``: {passive party: its representations [N, D] of the rows that it holds of the
    uploaded splits}. ``late``: the parties whose upload came after the deadline; their
    representations are zeros.
    """

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.by_party: dict[str, Tensor] = {}
        self.late: list[str] = []
        self._party, self._phase, self._deadline_s = party, name, settings.deadline_s
        self._side = party.exchanges.open_answering(
            name,
            declare_upload(settings, party.course.protected),
            width=party.exchanges.widths or party.exchanges.width,
        )
        # Whether the acknowledgement has not been sent yet.
        self._owes_acknowledgement = False

    def collect(self) -> RoundReport:
        """Collects one upload from each passive party (FedOnce, Alg. 1, line 19)."""
        party, deadline_s = self._party, self._deadline_s
        rows = np.concatenate([party.rows.get(split) for split in get_upload_splits(party.recipe)])
        received = self._side.collect(
            StepKey(self._phase, UPLOAD, 0),
            rows=len(rows),
            each=party.rows.get_sizes(rows),
            deadline_s=math.inf if deadline_s is None else deadline_s,
        )
        self.late = [
            passive.name for passive in party.recipe.passives if passive.name not in received
        ]
        self.by_party = {name: tensors["z"] for name, tensors in received.items()}
        self.by_party |= make_zeros(self.late, len(rows), party)
        self._owes_acknowledgement = True
        late = (
            f"trained without {', '.join(self.late)}, which did not answer within {deadline_s} s"
            if self.late
            else ""
        )
        return RoundReport(0, note=late, checkpoint=True, without=tuple(self.late))

    def acknowledge(self) -> None:
        """Answers the upload once a checkpoint contains the representations. A party may leave
        after the answer. Does nothing in a generation that began after the upload.
        """
        if not self._owes_acknowledgement:
            return
        self._owes_acknowledgement, step = False, StepKey(self._phase, UPLOAD, 0)
        names = [passive.name for passive in self._party.recipe.passives]
        if self._deadline_s is None:
            self._side.acknowledge(step, names)
            return
        used = {name: torch.tensor([name not in self.late], dtype=torch.uint8) for name in names}
        self._side.reply(step, {name: {"used": flag} for name, flag in used.items()})

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"representations": self.by_party, "late": self.late}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        device = self._party.device
        self.by_party = {name: r_ND.to(device) for name, r_ND in tree["representations"].items()}
        self.late = list(tree["late"])


class PassiveHead(Phase):
    """Runs two rounds: the upload, and the active party's training, during which this party is
    idle.
    """

    alone_from = TRAIN
    # The upload round may be skipped on resume: the active party has the upload in a checkpoint, or
    # asks for it again.
    skippable = (UPLOAD,)

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds, self._party = name, 2, party
        self.epochs = settings.epochs_over(len(party.rows.get_joint("train")))
        check_sets(party, name, settings)
        self._upload = party.exchanges.open_asking(
            name, declare_upload(settings, party.course.protected), width=party.exchanges.width
        )

    def run_round(self, round_: int) -> RoundReport:
        if round_ != UPLOAD:
            return RoundReport(0)
        party = self._party
        rows = np.concatenate([party.rows.get(split) for split in get_upload_splits(party.recipe)])
        reply = self._upload.swap(StepKey(self.name, round_, 0), {"z": embed(party, rows)}, rows)
        used = all(bool(flag) for flag in reply.values())
        note = "" if used else "our upload came after deadline_s: the model is trained without it"
        return RoundReport(0, note=note, checkpoint=True)
