"""Both sides of a probe, and joint prediction with its head. A passive party sends the latents of
all its rows, once. The active party trains a linear model on the rows with known labels, and
classifies by nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows, batches, derive_seed, stratify_order
from vfl_party.methods.probe.exchanges import (
    LATENTS,
    TRAINING,
    check_bottom,
    compute_digests,
    compute_features,
    compute_latents,
    compute_message_rows,
    count_parts,
    divide_rows,
    get_latent_shape,
    get_latent_sizes,
    list_senders,
    yield_steps,
)
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.models import forward, seed_torch
from vfl_party.models.halves import Tail
from vfl_party.models.layers import build_layers
from vfl_party.models.losses import loss_fn
from vfl_party.models.training import build_optimizer, build_schedule, clip
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics
from vfl_party.phases.scoring import Scored, compute_outputs


@dataclass(frozen=True)
class KnownRows:
    """The rows of a split whose labels the active party knows: the active party's row numbers [N],
    and features [N, E].
    """

    rows: Rows
    features: Tensor


def select_labelled(
    party: Party, phase: str, known: KnownRows, settings: ProbeSettings
) -> KnownRows:
    """Returns a stratified sample of the training rows, drawn by the recipe's seed, from whose
    labels the head learns.

    The sample of a larger share contains the sample of a smaller share. Raises InputError if no row
    remains, or only one row with hidden layers.
    """
    selected, share = known, settings.labelled
    if share < 1.0:
        targets = party.rows.need_labels()[1][torch.from_numpy(known.rows)].cpu()
        order = stratify_order(party.recipe.seed, targets.long().reshape(-1).numpy())
        positions = np.sort(order[: round(share * len(known.rows))])
        selected = KnownRows(
            known.rows[positions], known.features[torch.from_numpy(positions).to(party.device)]
        )
    min_rows = 2 if settings.hidden else 1
    if len(selected.rows) < min_rows:
        raise InputError(
            Code.DATA_INVALID,
            f"phase {phase}: labelled = {share:g} of {len(known.rows):,} training rows with labels "
            f"leaves too few (got {len(selected.rows)}, need {min_rows}). Increase labelled.",
        )
    return selected


class ProbeHead:
    """Trains the head: the top model or, with ``hidden``, a model that is discarded after the
    phase.
    """

    def __init__(self, party: Party, phase: str, settings: ProbeSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._hidden_head: nn.Module | None = None
        if settings.hidden:
            with seed_torch(derive_seed(party.own_seed, "init", party.name, phase)):
                head_layers = build_layers(
                    party.exchanges.width,
                    settings.hidden,
                    party.recipe.task.outputs,
                    batch_norm=True,
                )
            self._hidden_head = nn.Sequential(*head_layers).to(party.device)
        self._model = self._hidden_head if self._hidden_head is not None else party.models["top"]

    def _compute_logits(self, features_NE: Tensor) -> Tensor:
        if self._hidden_head is None:
            return self._party.outputs(features_NE)
        return forward(self._hidden_head, features_NE, precision=self._party.recipe.model.precision)

    @torch.no_grad()
    def compute_outputs(self, features_NE: Tensor) -> Tensor:
        """Returns the head's outputs for features, [N, O]."""
        self._model.eval()
        return self._compute_logits(features_NE)

    def train(self, train: KnownRows, y_N: Tensor) -> tuple[int, float]:
        """Trains the head on frozen features and returns the number of steps and the mean loss of
        the last epoch.
        """
        party, settings, phase, model = self._party, self._settings, self._phase, self._model
        optimizer = build_optimizer(settings.optimizer, model.parameters())
        positions = np.arange(len(train.rows), dtype=np.int64)
        steps_per_epoch = len(batches(party.own_seed, phase, 0, positions, settings.batch_size))
        epochs = max(settings.epochs, -(-settings.least_steps // steps_per_epoch))
        schedule = build_schedule(settings.optimizer, optimizer, epochs)
        weights = party.rows.compute_weights(train.rows)
        w_N = None if weights is None else party.rows.take(weights, train.rows)
        loss_function = loss_fn(party.recipe.task)
        steps, mean_loss = 0, 0.0
        model.train()
        for epoch in range(epochs):
            total = torch.zeros((), device=party.device)
            epoch_batches = batches(party.own_seed, phase, epoch, positions, settings.batch_size)
            for rows in epoch_batches:
                loss = loss_function(
                    self._compute_logits(party.rows.take(train.features, rows)),
                    party.rows.take(y_N, rows),
                    None if w_N is None else party.rows.take(w_N, rows),
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                clip(settings.optimizer, model.parameters())
                optimizer.step()
                total += loss.detach()
            schedule.step()
            steps, mean_loss = steps + len(epoch_batches), total.item() / len(epoch_batches)
        return steps, mean_loss


@dataclass(frozen=True)
class CollectedStep:
    """The rows that arrived in one step.

    ``parts``: {passive party: those of its rows that the active party knows}. ``unknown``: {passive
    party: the number of its rows that the active party does not know}.
    """

    split: str
    parts: Mapping[str, KnownRows]
    unknown: Mapping[str, int]


class LatentCollector:
    """The active party's side: computes features of the rows that it knows, step by step. Make one
    per phase.
    """

    def __init__(self, party: Party, tail: Tail, phase: str) -> None:
        self._party, self._tail, self._phase = party, tail, phase
        self._size = compute_message_rows(tail.latent)
        self._latents = party.exchanges.open_answering(
            phase, LATENTS, **get_latent_sizes(tail.latent)
        )

    def count(self, splits: Sequence[str]) -> int:
        """Returns the number of steps for the rows of ``splits``."""
        return sum(
            count_parts(split, self._party.rows.data.holdings, self._size) for split in splits
        )

    def collect(self, splits: Sequence[str]) -> Iterator[CollectedStep]:
        """Yields the rows of each step. Raises PeerError if a party sends one id for several
        rows.
        """
        party, holdings = self._party, self._party.rows.data.holdings
        ids = party.rows.data.ids
        row_by_digest = {
            bytes(digest): row
            for row, digest in enumerate(compute_digests(party.recipe, ids).numpy())
        }
        seen = {holder: np.zeros(len(ids), bool) for holder in holdings}
        for split, step, part in yield_steps(self._phase, splits, holdings, self._size):
            senders = list_senders(holdings, split, part, self._size)
            received = self._latents.collect(
                step, each={sender: {"rows": rows} for sender, rows in senders.items()}
            )
            self._latents.acknowledge(step, received)
            parts, unknown = {}, {}
            for sender, tensors in received.items():
                rows = [
                    row_by_digest.get(bytes(digest), -1) for digest in tensors["ids"].cpu().numpy()
                ]
                known_rows = np.array([row for row in rows if row >= 0], np.int64)
                if len(np.unique(known_rows)) < len(known_rows) or seen[sender][known_rows].any():
                    raise PeerError(
                        Code.MALFORMED_MESSAGE,
                        f"{sender}: sends one id for several rows at {step}.",
                        party=sender,
                    )
                seen[sender][known_rows] = True
                z = tensors["z"][torch.tensor([row >= 0 for row in rows])]
                with torch.no_grad():
                    parts[sender] = KnownRows(known_rows, compute_features(party, self._tail, z))
                unknown[sender] = len(rows) - len(known_rows)
            yield CollectedStep(split, parts, unknown)


class LatentSender:
    """A passive party's side: sends latents of its rows, with digests of their ids. Make one per
    phase.
    """

    def __init__(self, party: Party, phase: str) -> None:
        self._party, self._phase = party, phase
        latent = get_latent_shape(party)
        self._size = compute_message_rows(latent)
        self._latents = party.exchanges.open_asking(phase, LATENTS, **get_latent_sizes(latent))

    def count(self, splits: Sequence[str]) -> int:
        """Returns the number of steps for all parties' rows of ``splits``."""
        return sum(
            count_parts(split, self._party.rows.data.holdings, self._size) for split in splits
        )

    def send(self, splits: Mapping[str, Rows]) -> Iterator[None]:
        """Sends the rows of each split, and yields after each step."""
        party = self._party
        plan = yield_steps(self._phase, [*splits], party.rows.data.holdings, self._size)
        for split, step, part in plan:
            rows = splits[split][part * self._size : (part + 1) * self._size]
            if len(rows):
                z = compute_latents(party, rows)
                ids = compute_digests(party.recipe, [party.rows.data.ids[row] for row in rows])
                self._latents.swap(step, {"z": z, "ids": ids}, rows)
            yield


# The number of rows whose nearest neighbours are computed at once.
_QUERY_ROWS = 512
# The minimum share of votes, so that its logarithm is finite.
_MIN_SHARE = 1e-12


class ActiveProbe(Phase):
    """Runs one round: collects features, trains the top model on the training rows, and
    evaluates.
    """

    def __init__(self, party: Party, name: str, settings: ProbeSettings) -> None:
        self.name, self.rounds, self._party, self._settings = name, 1, party, settings
        check_bottom(party.recipe, name)
        tail = party.models.get("tail")
        if not isinstance(tail, Tail):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: there are no features to probe. Put a phase of kind "
                '"mocosfl" before this phase.',
            )
        if party.recipe.task.kind not in ("binary", "multiclass"):
            kind = party.recipe.task.kind
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: a probe needs a binary or multiclass task (got {kind}). "
                "Change task.kind, or remove the phase.",
            )
        self._tail, self._splits = tail, (TRAINING, *settings.splits)
        self._head = ProbeHead(party, name, settings)
        self._latents = LatentCollector(party, tail, name)

    def run_round(self, round_: int) -> RoundReport:
        party, (_, targets) = self._party, self._party.rows.need_labels()
        rows_by_split = self._collect(round_)
        train = rows_by_split[TRAINING]
        if not len(train.rows):
            raise InputError(
                Code.DATA_INVALID,
                f"phase {self.name}: {party.name} has no label for any training row of the other "
                "parties. Add labels with the ids that they use, and start again: the trained "
                "models are kept.",
            )
        train = select_labelled(party, self.name, train, self._settings)
        y_N = party.rows.take(targets, train.rows)
        num_steps, loss = self._head.train(train, y_N)
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        scored: dict[str, tuple[Rows, Tensor]] = {}
        for split in self._settings.splits:
            split_rows = rows_by_split[split]
            if not len(split_rows.rows):
                continue
            votes = self._compute_votes(split_rows.features, train.features, y_N)
            predictions[split] = split_rows.rows, self._head.compute_outputs(split_rows.features)
            scored |= {
                split: predictions[split],
                f"{split} by neighbours": (split_rows.rows, votes),
            }
        metrics = {"train": {"loss": loss}} | compute_metrics(party, scored, train.rows)
        counted = ", ".join(
            f"{len(split_rows.rows):,} {'training' if split_name == TRAINING else split_name}"
            for split_name, split_rows in rows_by_split.items()
        )
        repeated = _note_repeated(rows_by_split)
        if repeated:
            advise(party.hooks.show, f"phase {self.name}: {repeated}")
        num_used = len(train.rows)
        sample_note = (
            f"trained on {num_used:,} of them"
            if num_used < len(rows_by_split[TRAINING].rows)
            else ""
        )
        notes = [f"rows with labels: {counted}", sample_note, repeated]
        note = "; ".join(filter(None, notes))
        return RoundReport(num_steps, metrics, note=note, predictions=predictions)

    def _collect(self, round_: int) -> dict[str, KnownRows]:
        """Collects and returns {split: the rows with known labels, and their features}."""
        self._tail.eval()
        if not self._party.recipe.passives:
            return {
                split: self._compute_own("train" if split == TRAINING else split)
                for split in self._splits
            }
        party, received = self._party, dict[str, list[KnownRows]]()
        plan = range(self._latents.count(self._splits))
        for number, collected in zip(plan, self._latents.collect(self._splits), strict=True):
            for known_rows in collected.parts.values():
                received.setdefault(collected.split, []).append(known_rows)
            party.hooks.tick(self.name, round_, self.rounds, number + 1, len(plan))
        nothing = KnownRows(
            np.empty(0, np.int64), torch.empty(0, party.exchanges.width, device=party.device)
        )
        return {split: _concatenate(received.get(split, [nothing])) for split in self._splits}

    @torch.no_grad()
    def _compute_own(self, split: str) -> KnownRows:
        """Returns the rows of a split and their features, if this party is the only party."""
        party = self._party
        rows, bottom = party.rows.get(split), party.models["encoder"]
        bottom.eval()
        parts = [
            self._tail.features(bottom(*party.rows.need_features().inputs(part)))
            for part in divide_rows(rows, compute_message_rows(self._tail.latent))
        ]
        return KnownRows(
            rows,
            torch.cat(parts)
            if parts
            else torch.empty(0, party.exchanges.width, device=party.device),
        )

    @torch.no_grad()
    def _compute_votes(self, features_NE: Tensor, bank_ME: Tensor, y_M: Tensor) -> Tensor:
        """Returns the logits [N, O] of the nearest neighbours' votes (Wu et al. 2018, section
        3.4).
        """
        settings, task = self._settings, self._party.recipe.task
        bank_ME = functional.normalize(bank_ME, dim=1)
        classes = y_M.long().reshape(-1)
        outputs = []
        for part in torch.split(features_NE, _QUERY_ROWS):
            nearest = (functional.normalize(part, dim=1) @ bank_ME.T).topk(
                min(settings.neighbours, len(bank_ME)), dim=1
            )
            # Weights are relative to the nearest row, whose weight is 1.
            weights = ((nearest.values - nearest.values[:, :1]) / settings.temperature).exp()
            votes = torch.zeros(len(part), max(2, task.outputs), device=part.device)
            votes.scatter_add_(1, classes[nearest.indices], weights)
            shares = (votes / votes.sum(dim=1, keepdim=True)).clamp_min(_MIN_SHARE)
            logits = shares.log()
            outputs.append(logits if task.kind == "multiclass" else logits[:, 1:] - logits[:, :1])
        return torch.cat(outputs)


def _note_repeated(rows_by_split: Mapping[str, KnownRows]) -> str:
    """Returns a note on rows that several parties hold, and on rows that are both in training and
    in evaluation; '' if no row is held by several parties.
    """
    rows = np.concatenate([split_rows.rows for split_rows in rows_by_split.values()])
    unique, counts = np.unique(rows, return_counts=True)
    repeated = unique[counts > 1]
    if not len(repeated):
        return ""
    leaked = np.intersect1d(
        rows_by_split[TRAINING].rows,
        np.concatenate(
            [split_rows.rows for split, split_rows in rows_by_split.items() if split != TRAINING]
        ),
    )
    if not len(leaked):
        return f"several parties hold {len(repeated):,} of the ids"
    return (
        f"several parties hold {len(repeated):,} of the ids, and {len(leaked):,} of these are both "
        "in training and in evaluation: the scores are too high"
    )


def _concatenate(parts: list[KnownRows]) -> KnownRows:
    return KnownRows(
        np.concatenate([part.rows for part in parts]), torch.cat([part.features for part in parts])
    )


class ProbeScorer:
    """A ``vfl_party.phases.scoring.Scorer``. Each passive party passes the rows that it has, in its
    order. The active party passes the rows that it wants to score.

    If several parties send a row, the result of the first of them in the recipe counts.
    """

    def __init__(self, party: Party, phase: str) -> None:
        self._party = party
        self._collector: LatentCollector | None = None
        self._sender: LatentSender | None = None
        if party.role == "passive":
            self._sender = LatentSender(party, phase)
        elif party.recipe.passives:
            self._collector = LatentCollector(party, _get_tail(party), phase)

    @torch.no_grad()
    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Scores the active party's rows. A row that no party sends gets NaN."""
        _ = first
        party, tail = self._party, _get_tail(self._party)
        for model in (tail, party.models["top"]):
            model.eval()
        outputs_NO = torch.full(
            (len(rows), party.recipe.task.outputs), torch.nan, device=party.device
        )
        if self._collector is None:
            for places in divide_rows(
                np.arange(len(rows), dtype=np.int64), compute_message_rows(tail.latent)
            ):
                features = compute_features(party, tail, compute_latents(party, rows[places]))
                outputs_NO[torch.from_numpy(places)] = compute_outputs(party, features)
            return Scored(outputs_NO, {}, 0)
        steps = 0
        outputs: dict[str, torch.Tensor] = {}
        # Parties are in the recipe's order.
        rows_by_party = {holder: np.zeros(len(rows), bool) for holder in party.rows.data.holdings}
        unlisted = dict.fromkeys(rows_by_party, 0)
        for collected in self._collector.collect([TRAINING]):
            steps += 1
            for name, part in collected.parts.items():
                party_outputs = outputs.setdefault(name, torch.full_like(outputs_NO, torch.nan))
                if len(part.rows):
                    scores = compute_outputs(party, part.features)
                    party_outputs[torch.from_numpy(part.rows)] = scores
                rows_by_party[name][part.rows] = True
                unlisted[name] += collected.unknown[name]
        # Outputs are written in reverse order, so that the first party in the recipe counts.
        for name in reversed([holder for holder in rows_by_party if holder in outputs]):
            has_row_N = torch.from_numpy(rows_by_party[name])
            outputs_NO[has_row_N] = outputs[name][has_row_N]
        return Scored(outputs_NO, {}, steps, by=rows_by_party, unlisted=unlisted)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Sends the latents of all rows of a passive party."""
        _ = first
        assert self._sender is not None  # noqa: S101 - only passive parties answer
        return sum(1 for _ in self._sender.send({TRAINING: rows}))


def _get_tail(party: Party) -> Tail:
    tail = party.models.get("tail")
    if not isinstance(tail, Tail):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {party.name} has no features to predict from. Put a phase of kind "
            '"mocosfl" first.',
        )
    return tail


class PassiveProbe(Phase):
    """Runs one round, in which it sends the latents of the rows of each split."""

    def __init__(self, party: Party, name: str, settings: ProbeSettings) -> None:
        self.name, self.rounds, self._party, self._settings = name, 1, party, settings
        check_bottom(party.recipe, name)
        self._latents = LatentSender(party, name)

    def run_round(self, round_: int) -> RoundReport:
        party, splits = self._party, (TRAINING, *self._settings.splits)
        plan = range(self._latents.count(splits))
        rows = {split: party.rows.get(split) for split in splits}
        for number, _ in zip(plan, self._latents.send(rows), strict=True):
            party.hooks.tick(self.name, round_, self.rounds, number + 1, len(plan))
        return RoundReport(0)
