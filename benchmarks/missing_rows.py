"""Training in one process with rows that some parties lack, each row with its own set of parties.

What the library does for whole batches is here done for single rows: its encoders, top models,
losses, rules and weights of sets, with a mask. A row that a passive party lacks has no embedding of
it, in training as in the test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from math import comb

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.missing_tasks import ACTIVE, Setting
from vfl_common.config.models import MlpSettings, TopSettings
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.methods.student.training import distillation_distance
from vfl_party.models import build_top, seed_torch
from vfl_party.models.encoders import build_encoder
from vfl_party.models.layers import InputSpec
from vfl_party.models.losses import loss_fn
from vfl_party.models.metrics import evaluate
from vfl_party.models.top import StandIns

Mask = npt.NDArray[np.bool_]
WIDTH, TOP, BATCH, LR = 32, 32, 256, 3e-3
DROPOUT, TEMPERATURE = 0.3, 2.0
# {way: (rule, what stands in for a missing embedding)}. "complete": trains on rows that all hold.
WAYS = {
    "complete rows, zeros": ("mean", "zeros"),
    "plain, zeros": ("mean", "zeros"),
    "plain, mean": ("mean", "mean"),
    "party dropout": ("concat", "learnt"),
    "subsets": ("mean", "nothing"),
    "student": ("alone", "nothing"),
    "alone": ("alone", "nothing"),
}
TEACHER = "complete rows, zeros"
PLAIN = ("plain, zeros", "plain, mean")


class Model(nn.Module):
    """Encoders, a top model, and what stands in for embeddings that are missing.

    ``means``: of each passive party's embeddings of the training rows that it has, [D].
    """

    def __init__(self, setting: Setting, way: str, seed: int) -> None:
        super().__init__()
        self.rule, self.stand_in = WAYS[way]
        names = [ACTIVE] if self.rule == "alone" else [*setting.columns]
        mlp = MlpSettings(kind="mlp", hidden=(setting.hidden,))
        with seed_torch(derive_seed(seed, "init")):
            self.encoders = nn.ModuleDict(
                {
                    name: build_encoder(mlp, InputSpec((setting.columns[name].shape[1],)), WIDTH)
                    for name in names
                }
            )
            inputs = WIDTH * (len(names) if self.rule == "concat" else 1)
            self.top = build_top(TopSettings(hidden=(TOP,)), inputs, setting.task.outputs)
        self.stand_ins = StandIns(dict.fromkeys(names[1:], WIDTH))
        self.means: dict[str, Tensor] = {}

    def embed(self, columns: dict[str, Tensor]) -> list[Tensor]:
        return [encoder(columns[name]) for name, encoder in self.encoders.items()]

    def outputs(self, z_BD: list[Tensor], there_BP: Tensor) -> Tensor:
        """Scores embeddings. ``there_BP``: which passive parties take part in each row."""
        own, others = z_BD[0], z_BD[1:]
        if not others:
            return self._scored(own)
        parts = [own]
        for n, name in enumerate([*self.encoders][1:]):
            is_there_B1 = there_BP[:, n : n + 1]
            parts.append(torch.where(is_there_B1, others[n], self._instead(name, others[n])))
        if self.rule == "concat":
            return self._scored(torch.cat(parts, dim=1))
        count = 1 + there_BP.sum(dim=1, keepdim=True) if self.stand_in == "nothing" else len(parts)
        return self._scored(sum(parts[1:], start=own) / count)

    def _scored(self, x: Tensor) -> Tensor:
        found: Tensor = self.top(x)
        return found

    def _instead(self, name: str, z_BD: Tensor) -> Tensor:
        if self.stand_in == "learnt":
            return self.stand_ins.of(name, len(z_BD))
        if self.stand_in == "mean":
            return self.means[name].expand(len(z_BD), -1)
        return torch.zeros_like(z_BD)


class Trial:
    """Rows of a setting, of which passive parties lack some; trains the ways to deal with it.

    Args:
        known: which passive party has which row, [N, P].
        epochs: over ``train``; whoever trains on fewer rows makes as many steps.
    """

    def __init__(self, setting: Setting, train: Rows, known: Mask, seed: int, epochs: int) -> None:
        self._setting, self._train, self._seed, self._epochs = setting, train, seed, epochs
        self._columns = {name: torch.from_numpy(x) for name, x in setting.scaled(train).items()}
        y = torch.from_numpy(setting.y)
        self._y = y if setting.task.kind == "multiclass" else y[:, None].float()
        self._known = torch.from_numpy(known)
        self._teacher: Model | None = None

    def trained(self, way: str) -> Model:
        """Trains a model. The student needs that of ``TEACHER``, which is trained first."""
        complete = self._train[self._known[self._train].all(dim=1).numpy()]
        # Plain training does not depend on what would stand in for a party if one was missing.
        same = way == TEACHER or (way in PLAIN and len(complete) == len(self._train))
        if same and self._teacher is not None:
            found = copy.deepcopy(self._teacher)
            found.stand_in = WAYS[way][1]
            return found
        model = Model(self._setting, way, self._seed)
        rows = complete if way == TEACHER else self._train
        loss = self._loss_of(way, model, complete)
        optimizer = torch.optim.Adam(model.parameters(), LR)
        # A mean moves with its encoder, and changes little within an epoch.
        an_epoch = -(-len(self._train) // BATCH)
        for step, batch in enumerate(self._batches(rows)):
            if model.stand_in == "mean" and step % an_epoch == 0:
                self._find_means(model)
            optimizer.zero_grad()
            loss(torch.from_numpy(batch), step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        self._find_means(model)
        if way == TEACHER:
            self._teacher = model
        return model

    def _batches(self, rows: Rows) -> Iterator[Rows]:
        steps, random = (
            self._epochs * -(-len(self._train) // BATCH),
            np.random.default_rng([self._seed, 1]),
        )
        while steps > 0:
            order = random.permutation(rows)
            for first in range(0, len(order), BATCH):
                if steps > 0:
                    steps -= 1
                    yield order[first : first + BATCH]

    def _loss_of(self, way: str, model: Model, complete: Rows) -> Callable[[Tensor, int], Tensor]:
        if way == "student":
            return self._student_loss(model, self.trained(TEACHER), complete)
        if way == "subsets":
            return lambda rows, step: self._sets_loss(model, rows, step)
        dropout = DROPOUT if way == "party dropout" else 0.0
        own = loss_fn(self._setting.task)

        def loss(rows: Tensor, step: int) -> Tensor:
            random = np.random.default_rng([self._seed, 2, step])
            kept_P = torch.from_numpy(random.random(self._known.shape[1]) >= dropout)
            z_BD = model.embed(self._of(rows))
            return own(model.outputs(z_BD, self._known[rows] & kept_P), self._y[rows])

        return loss

    def _sets_loss(self, model: Model, rows: Tensor, step: int) -> Tensor:
        """One set of each size from the parties that have the row, as LASER-VFL draws them."""
        own, known_BP = loss_fn(self._setting.task), self._known[rows]
        random = np.random.default_rng([self._seed, 2, step])
        order = torch.from_numpy(random.permutation(known_BP.shape[1]))
        # Of each row, how many of the parties that have it come before each party.
        place_BP = torch.empty_like(known_BP, dtype=torch.int64)
        place_BP[:, order] = known_BP[:, order].long().cumsum(dim=1) - known_BP[:, order].long()
        counts = known_BP.sum(dim=1)
        z_BD, total = model.embed(self._of(rows)), torch.zeros(())
        for others in range(known_BP.shape[1] + 1):
            weights = [comb(count, others) / (others + 1) for count in range(known_BP.shape[1] + 1)]
            w_B = torch.tensor(weights)[counts]
            outputs = model.outputs(z_BD, known_BP & (place_BP < others))
            total = total + own(outputs, self._y[rows], w_B)
        return total

    def _student_loss(
        self, model: Model, teacher: Model, complete: Rows
    ) -> Callable[[Tensor, int], Tensor]:
        """Labels of all rows, and the teacher's answers for the complete ones."""
        own, task = loss_fn(self._setting.task), self._setting.task
        every = torch.arange(len(self._y))
        with torch.no_grad():
            answers = teacher.outputs(teacher.embed(self._of(every)), self._known)
        taught = torch.zeros(len(every), dtype=torch.bool)
        taught[torch.from_numpy(complete)] = True

        def loss(rows: Tensor, step: int) -> Tensor:
            _ = step
            outputs = model.outputs(model.embed(self._of(rows)), self._known[rows])
            at = rows[taught[rows]]
            apart = distillation_distance(task, TEMPERATURE, outputs[taught[rows]], answers[at])
            return own(outputs, self._y[rows]) + apart.sum() / len(rows)

        return loss

    def _of(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: each[rows] for name, each in self._columns.items()}

    @torch.no_grad()
    def _find_means(self, model: Model) -> None:
        """Finds each passive party's mean embedding of the training rows that it has."""
        for n, name in enumerate([*model.encoders][1:]):
            rows = self._train[self._known[self._train, n].numpy()]
            model.means[name] = model.encoders[name](self._columns[name][rows]).mean(dim=0)

    @torch.no_grad()
    def quality(self, model: Model, rows: Rows, there: Mask) -> float:
        """Returns the task's metric. ``there``: who takes part in each of ``rows``, [n, P]."""
        z_BD = model.embed(self._of(torch.from_numpy(rows)))
        outputs = model.outputs(z_BD, torch.from_numpy(there))
        return evaluate(self._setting.task, outputs, self._y[rows])[self._setting.metric]
