"""The active party's side: receives representations, computes the loss, and returns gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.fedcvt.exchanges import VALIDATION, declare_representations
from vfl_party.methods.fedcvt.losses import Representations
from vfl_party.methods.fedcvt.objective import TERMS, Objective
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.training import FedCVTTraining
from vfl_party.models import forward, seed_torch
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_sums
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.scoring import SplitScorer


class ActiveFedCVT(Phase):
    """Trains with FedCVT. One round is ``validate_every`` epochs over the labelled rows.

    The joint classifier is the party's top model. The classifiers of a single view are discarded
    after the phase.
    """

    def __init__(self, party: Party, name: str, settings: FedCVTSettings) -> None:
        self._party = party
        heads = {view: _make_head(party, name, view) for view in ("active", "passive")}
        self._training = FedCVTTraining(party, name, settings, heads)
        self.name, self.rounds = name, self._training.batches.rounds
        self.epochs = self._training.batches.epochs
        self._passive_own_rows = settings.get_own_batch_size("passive")
        sizes = {"width": party.embedding_size, "own": self._passive_own_rows}
        self._representations = party.answering(name, declare_representations(settings), **sizes)
        self._validation = SplitScorer(party, name, VALIDATION)
        recipe, precision = party.recipe, party.recipe.model.precision
        self._objective = Objective(
            recipe.task,
            recipe.preset,
            settings,
            both=party.outputs,
            active=partial(forward, heads["active"], precision=precision),
            passive=partial(forward, heads["passive"], precision=precision),
        )

    def run_round(self, round_: int) -> RoundReport:
        party, training, features = self._party, self._training, self._party.need_features()
        _, targets = party.need_labels()
        steps = training.steps(round_)
        training.train_mode()
        tick = party.ticker(self.name, round_, self.rounds, len(steps))
        loss, terms = (
            torch.zeros((), device=party.device),
            torch.zeros(len(TERMS), device=party.device),
        )
        num_labelled = torch.zeros((), dtype=torch.int64, device=party.device)
        for batch, rows in enumerate(steps):
            step = StepKey(self.name, round_, batch)
            training.zero_grad()
            y_L = party.take(targets, rows.labelled)
            r_BD = party.encode(*features.inputs(rows.rows))
            ((passive, received),) = self._representations.collect(step, rows=rows.aligned).items()
            for tensor in received.values():
                tensor.requires_grad_()
            active_views = Representations(r_BD[: rows.aligned], r_BD[rows.aligned :])
            passive_views = Representations(received["aligned"], received.get("own", r_BD[:0]))
            step_loss = self._objective(active_views, passive_views, y_L, pseudo=rows.pseudo)
            step_loss.loss.backward()  # type: ignore[no-untyped-call]
            gradients = {f"d_{name}": _get_gradient(tensor) for name, tensor in received.items()}
            check_sums(party, step, step_loss.loss, gradients.values(), {passive: received})
            # The reply comes before the update, so that the passive party continues meanwhile. Its
            # gradients belong to the weights before the update.
            self._representations.reply(step, {passive: gradients}, about=rows.rows[: rows.aligned])
            training.step(last=rows.last)
            loss, terms, num_labelled = (
                loss + step_loss.loss.detach(),
                terms + step_loss.terms,
                num_labelled + step_loss.taken,
            )
            tick()
        num_candidates = sum(
            len(rows.unlabelled) + len(rows.own) + self._passive_own_rows for rows in steps
        )
        means = (terms / len(steps)).tolist()
        metrics: dict[str, dict[str, float]] = {
            "train": {"loss": loss.item() / len(steps)},
            "terms": dict(zip(TERMS, means, strict=True)),
            "pseudo": {"taken": num_labelled.item(), "offered": num_candidates},
        }
        training.check(StepKey(self.name, round_, len(steps)))
        self._validate(round_, len(steps), metrics)
        return RoundReport(len(steps), metrics)

    def _validate(self, round_: int, batch: int, metrics: dict[str, dict[str, float]]) -> None:
        party, rows = self._party, self._party.rows("validation")
        outputs = self._validation.score(rows, StepKey(self.name, round_, batch)).outputs
        if len(rows):
            metrics.update(compute_metrics(party, {"validation": (rows, outputs)}))

    def state(self) -> Tree:
        return self._training.state()

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)


def _make_head(party: Party, phase: str, view: str) -> nn.Module:
    """Makes the linear classifier of one party's view, with its initial weights."""
    with seed_torch(derive_seed(party.own_seed, "init", party.name, phase, view)):
        head = nn.Linear(party.embedding_size, party.recipe.task.outputs)
    return head.to(party.device)


def _get_gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
