"""Both sides of a FedCVT phase. The passive party sends representations. The active party computes
the whole loss and returns gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_common.config.task import TaskSettings
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.fedcvt.settings import FedCVTSettings, Preset
from vfl_party.methods.fedcvt.training import (
    VALIDATION,
    FedCVTTraining,
    Representations,
    declare_representations,
    estimate_view,
    make_pseudo_labels,
    mean_distance,
    mean_overlap,
    split_halves,
)
from vfl_party.models import combine, forward, seed_torch
from vfl_party.models.losses import loss_fn
from vfl_party.models.training import backward
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_own, check_sums
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
        sizes = {"width": party.exchanges.width, "own": self._passive_own_rows}
        self._representations = party.exchanges.open_answering(
            name, declare_representations(settings), **sizes
        )
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
        party, training, features = self._party, self._training, self._party.rows.need_features()
        _, targets = party.rows.need_labels()
        steps = training.steps(round_)
        training.train_mode()
        tick = party.hooks.make_ticker(self.name, round_, self.rounds, len(steps))
        loss, terms = (
            torch.zeros((), device=party.device),
            torch.zeros(len(TERMS), device=party.device),
        )
        num_labelled = torch.zeros((), dtype=torch.int64, device=party.device)
        for batch, rows in enumerate(steps):
            step = StepKey(self.name, round_, batch)
            training.zero_grad()
            y_L = party.rows.take(targets, rows.labelled)
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
        party, rows = self._party, self._party.rows.get("validation")
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
        head = nn.Linear(party.exchanges.width, party.recipe.task.outputs)
    return head.to(party.device)


def _get_gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


Classify = Callable[[Tensor], Tensor]
TERMS = ("classifiers", "shared", "overlap", "estimate")


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step.

    ``terms``: the values of ``TERMS``, without weights. ``taken``: the number of rows that got
    pseudo-labels.
    """

    loss: Tensor
    terms: Tensor
    taken: Tensor


@dataclass(frozen=True)
class Objective:
    """Computes the loss of a step.

    ``both``: the joint classifier f^AB. ``active``, ``passive``: the classifiers f^A and f^B, each
    of one party's view.
    """

    task: TaskSettings
    preset: Preset
    settings: FedCVTSettings
    both: Classify
    active: Classify
    passive: Classify

    def __call__(
        self, active: Representations, passive: Representations, y_L: Tensor, *, pseudo: bool
    ) -> StepLoss:
        """Returns the loss of a step of which the first L aligned rows have labels.

        ``pseudo``: whether rows without labels may get pseudo-labels.
        """
        sharpen, num_aligned = self.settings.resolve_sharpness(self.preset), len(active.aligned)
        estimated_passive = estimate_view(active.all, active, passive, sharpen)
        estimated_active = estimate_view(passive.all, passive, active, sharpen)
        # The rows are the aligned rows, then the active party's own rows, then the passive party's
        # own rows.
        r_active = torch.cat([active.all, estimated_active[num_aligned:]])
        r_passive = torch.cat([passive.aligned, estimated_passive[num_aligned:], passive.own])
        classifiers, taken = self._classify(
            r_active, r_passive, y_L, num_aligned, len(active.own), pseudo=pseudo
        )
        shared_distance = mean_distance(
            split_halves(active.aligned)[1], split_halves(passive.aligned)[1], self.preset
        )
        terms: Mapping[str, Tensor] = {
            "shared": shared_distance,
            "overlap_active": mean_overlap(active.all, self.preset),
            "overlap_passive": mean_overlap(passive.all, self.preset),
            "estimate_active": mean_distance(
                estimated_active[:num_aligned], active.aligned, self.preset
            ),
            "estimate_passive": mean_distance(
                estimated_passive[:num_aligned], passive.aligned, self.preset
            ),
        }
        loss = classifiers
        for name, term in terms.items():
            loss = loss + self.settings.lambdas.of(name, self.preset) * term
        term_sums = [
            terms[f"{name}_active"] + terms[f"{name}_passive"] for name in ("overlap", "estimate")
        ]
        return StepLoss(
            loss, torch.stack([classifiers, shared_distance, *term_sums]).detach(), taken
        )

    def _classify(
        self,
        r_active: Tensor,
        r_passive: Tensor,
        y_L: Tensor,
        num_aligned: int,
        num_active_own: int,
        *,
        pseudo: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum of the three cross-entropies, and the number of rows that got
        pseudo-labels.

        The joint classifier learns from all rows with labels or pseudo-labels. A party's classifier
        learns only from rows that the party has, because the party's view of other rows is an
        estimate.
        """
        outputs = [
            self.both(combine("concat", [r_active, r_passive])),
            self.active(r_active),
            self.passive(r_passive),
        ]
        taken_N, labels_N = make_pseudo_labels(
            self.task, [out[len(y_L) :] for out in outputs], self.settings.threshold
        )
        if not pseudo:
            taken_N = torch.zeros_like(taken_N)
        with_label_N = torch.cat([taken_N.new_ones(len(y_L)), taken_N])
        y_N, place_N = (
            torch.cat([y_L, labels_N]),
            torch.arange(len(with_label_N), device=y_L.device),
        )
        masks = [
            with_label_N,
            with_label_N & (place_N < num_aligned + num_active_own),
            with_label_N & ((place_N < num_aligned) | (place_N >= num_aligned + num_active_own)),
        ]
        loss = loss_fn(self.task)
        losses = [loss(out[rows], y_N[rows]) for out, rows in zip(outputs, masks, strict=True)]
        return torch.stack(losses).sum(), taken_N.sum()


class PassiveFedCVT(Phase):
    """Trains with FedCVT. One round is ``validate_every`` epochs over the labelled rows."""

    def __init__(self, party: Party, name: str, settings: FedCVTSettings) -> None:
        self._party = party
        self._training = FedCVTTraining(party, name, settings)
        self.name, self.rounds = name, self._training.batches.rounds
        self.epochs = self._training.batches.epochs
        sizes = {"width": party.exchanges.width, "own": settings.get_own_batch_size("passive")}
        self._representations = party.exchanges.open_asking(
            name, declare_representations(settings), **sizes
        )
        self._validation = SplitScorer(party, name, VALIDATION)

    def run_round(self, round_: int) -> RoundReport:
        party, training, features = self._party, self._training, self._party.rows.need_features()
        training.train_mode()
        steps = training.steps(round_)
        tick = party.hooks.make_ticker(self.name, round_, self.rounds, len(steps))
        for batch, rows in enumerate(steps):
            step = StepKey(self.name, round_, batch)
            r_BD = party.encode(*features.inputs(rows.rows))
            check_own(party, step, {"representations": r_BD.detach()})
            representations_by_name = {"aligned": r_BD[: rows.aligned], "own": r_BD[rows.aligned :]}
            tensor_names = self._representations.exchange.up.tensors
            self._representations.send(
                step, {name: representations_by_name[name] for name in tensor_names}, rows.rows
            )
            training.zero_grad()
            reply = self._representations.receive(step, rows=rows.aligned)
            dr_BD = torch.cat([reply[f"d_{name}"] for name in tensor_names])
            backward(r_BD, dr_BD)
            training.step(last=rows.last)
            tick()
        training.check(StepKey(self.name, round_, len(steps)))
        self._validation.answer(
            party.rows.get("validation"), StepKey(self.name, round_, len(steps))
        )
        return RoundReport(len(steps))

    def state(self) -> Tree:
        return self._training.state()

    def load_state(self, tree: Tree) -> None:
        self._training.load_state(tree)
