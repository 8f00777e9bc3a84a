"""A method: split training with plain SGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pydantic import PositiveInt

from vfl.api import (
    Exchange,
    Kind,
    Method,
    Occurrence,
    Party,
    Phase,
    RoundReport,
    Rows,
    Section,
    Sent,
    StepKey,
    Traffic,
    batches,
    combine,
    f32,
    loss_fn,
)

# Declared once: passive parties ask the active party with z, and it answers with dz.
EMBEDDING = Exchange(
    "embedding",
    up=Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}),
    down=Sent(Kind.GRADIENT, {"dz": f32("rows", "width")}),
)


class PlainSettings(Section):
    """The phase's keys besides kind and name."""

    epochs: PositiveInt
    batch_size: PositiveInt = 64
    lr: float = 0.1


def steps(
    party: Party, name: str, round_: int, settings: PlainSettings
) -> list[tuple[StepKey, Rows]]:
    """Returns a round's steps with their rows: drawn from the seed, so they are the same on all
    sides.
    """
    epoch = batches(party.recipe.seed, name, round_, party.rows.get("train"), settings.batch_size)
    return [(StepKey(name, round_, batch), rows) for batch, rows in enumerate(epoch)]


class Side(Phase):
    """The part that both sides share."""

    def __init__(self, party: Party, name: str, settings: PlainSettings) -> None:
        self.name, self.rounds, self.party, self.settings = name, settings.epochs, party, settings
        # "encoder"; "top" at the active party; on party.device.
        self.models = torch.nn.ModuleDict(party.models)
        self.optimizer = torch.optim.SGD(self.models.parameters(), lr=settings.lr)

    def state(self) -> dict[str, Any]:
        """Returns all that the next round needs beyond the models and torch's generators."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state(self, tree: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(tree["optimizer"])

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        """Returns the rows of a step, for the attacks of `vfl leaks`, which compare with the
        truth.
        """
        epoch = steps(self.party, self.name, step.round, self.settings)
        return epoch[step.batch][1] if exchange == EMBEDDING.name else None


class Passive(Side):
    def __init__(self, party: Party, name: str, settings: PlainSettings) -> None:
        super().__init__(party, name, settings)
        exchanges = party.exchanges
        self.embedding = exchanges.open_asking(name, EMBEDDING, width=exchanges.width)

    def run_round(self, round_: int) -> RoundReport:
        self.models.train()
        todo = steps(self.party, self.name, round_, self.settings)
        tick = self.party.hooks.make_ticker(self.name, round_, self.rounds, len(todo))
        for step, rows in todo:
            z_BD = self.party.encode(*self.party.rows.need_features().inputs(rows))
            dz_BD = self.embedding.swap(step, {"z": z_BD}, rows, rows=len(rows))["dz"]
            self.optimizer.zero_grad()
            z_BD.backward(dz_BD)
            self.optimizer.step()
            tick()
        return RoundReport(len(todo))


class Active(Side):
    def __init__(self, party: Party, name: str, settings: PlainSettings) -> None:
        super().__init__(party, name, settings)
        exchanges = party.exchanges
        self.embedding = exchanges.open_answering(name, EMBEDDING, width=exchanges.width)

    def run_round(self, round_: int) -> RoundReport:
        self.models.train()
        party, total, todo = self.party, 0.0, steps(self.party, self.name, round_, self.settings)
        (_, targets), loss_of = party.rows.need_labels(), loss_fn(party.recipe.task)
        tick = party.hooks.make_ticker(self.name, round_, self.rounds, len(todo))
        for step, rows in todo:
            own = party.rows.embed(rows)
            received = self.embedding.collect(step, rows=len(rows))
            z_BD = {name: tensors["z"].requires_grad_() for name, tensors in received.items()}
            combined = combine(party.recipe.model.combine, [*own, *z_BD.values()])
            loss = loss_of(party.outputs(combined), party.rows.take(targets, rows))
            self.optimizer.zero_grad()
            loss.backward()
            replies = {name: {"dz": z.grad} for name, z in z_BD.items()}
            self.embedding.reply(step, replies, about=rows)
            self.optimizer.step()
            total += loss.item()
            tick()
        return RoundReport(len(todo), {"train": {"loss": total / len(todo)}})


class Plain(Method[PlainSettings]):
    """What the method does otherwise than most: it says what it sends."""

    def traffic(self, party: Party, phase: str, settings: PlainSettings) -> Traffic:
        """Returns what `vfl forecast` counts; the party has rows, but perhaps no features."""
        width = party.exchanges.width

        def occurrences() -> Iterator[Occurrence]:
            for round_ in range(settings.epochs):
                for step, rows in steps(party, phase, round_, settings):
                    yield Occurrence.of(EMBEDDING, step, rows=len(rows), width=width)

        return Traffic(occurrences())


METHOD = Plain(PlainSettings, Active, Passive, encodes=True)
