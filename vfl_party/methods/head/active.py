"""The active side: representations in once, then the top model on what it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_common.metrics import evaluate, loss_fn
from vfl_common.optim import build_optimizer, build_schedule, clip
from vfl_common.phase import Phase, RoundReport, Tree
from vfl_common.seeds import batches
from vfl_party.context import Party
from vfl_party.methods.head.settings import UPLOAD, HeadSettings
from vfl_party.scoring import joint_embeddings


class ActiveHead(Phase):
    """Two rounds: the upload, and the training."""

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds = name, 2
        self._party, self._settings = party, settings
        self._loss = loss_fn(party.recipe.task)
        if len(party.rows("train")) == 0:
            raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {name}: there are no labelled training rows")
        self._r: dict[str, Tensor] = {}  # {split: combined representations, [N of the split, …]}

    def run_round(self, round_: int) -> RoundReport:
        if round_ == UPLOAD:
            batch = 0
            for split in ("train", "validation"):
                self._r[split], batch = joint_embeddings(self._party, self.name, round_, batch, self._party.rows(split))
            return RoundReport(0)
        return self._train(round_)

    def _train(self, round_: int) -> RoundReport:
        party, settings, top = self._party, self._settings, self._party.models["top"]
        rows = party.rows("train")
        labels, targets = party.need_labels()
        y_N, r_ND = party.take(targets, rows), self._r["train"]
        params = list(top.parameters())
        optimizer = build_optimizer(settings.optimizer, params)
        epochs = settings.epochs_over(len(rows))
        schedule = build_schedule(settings.optimizer, optimizer, epochs)
        positions = torch.arange(len(rows)).numpy()
        steps, loss = 0, torch.zeros((), device=party.device)
        top.train()
        for epoch in range(epochs):  # Alg. 1, lines 6 to 10
            for batch in batches(party.recipe.seed, self.name, epoch, positions, settings.batch_size):
                optimizer.zero_grad()
                loss = self._loss(top(party.take(r_ND, batch)), party.take(y_N, batch))
                loss.backward()  # type: ignore[no-untyped-call]
                clip(settings.optimizer, params)
                optimizer.step()
                steps += 1
            schedule.step()
            party.tick(self.name, round_, self.rounds, epoch + 1, epochs)
        metrics = {"train": {"loss": loss.item()}}
        held_out = party.rows("validation")
        if len(held_out):
            top.eval()
            with torch.no_grad():
                outputs = top(self._r["validation"])
            metrics["validation"] = evaluate(party.recipe.task, outputs, party.take(targets, held_out), labels.unscale)
        return RoundReport(steps, metrics)

    def state(self) -> Tree:
        return {"representations": self._r}

    def load_state(self, tree: Tree) -> None:
        self._r = {split: r.to(self._party.device) for split, r in tree["representations"].items()}
