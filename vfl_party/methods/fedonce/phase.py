"""The local phase of FedOnce, the same for both roles: the party trains alone, with one of four
objectives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import MlpSettings, TopSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows, batches, derive_seed
from vfl_party.methods.fedonce.settings import ADAM, FedOnceSettings, Output
from vfl_party.models import build_top, generator, seed_torch
from vfl_party.models.training import build_optimizer, build_schedule, clip, own_optimizer
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.privacy.dpsgd import PrivateSteps
from vfl_party.selfsup.settings import SelfSupSettings, make_plan
from vfl_party.selfsup.towers import LocalSelfSup, build_tower, report


class BoundedEncoder(nn.Module):
    """An encoder with a bound on its output: ``tanh``, or ``sphere``, which scales every row to
    norm 1.

    The bound is part of the encoder, not of the phase, because uploads and predictions need it too.
    """

    def __init__(self, body: nn.Module, output: Output) -> None:
        super().__init__()
        self.body, self.output = body, output

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, D]."""
        z_BD: Tensor = self.body(*inputs)
        return z_BD.tanh() if self.output == "tanh" else F.normalize(z_BD)


def make_learnt_encoder(settings: FedOnceSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that this phase trains, with its initial weights. See
    ``Method.encoder``.
    """
    if make.party == make.recipe.active.name and not settings.active:
        return make("encoder")
    if settings.objective == "pca":
        return _make_linear(make)
    is_table = len(make.spec.shape) == 1
    output = settings.output or ("tanh" if settings.objective == "nat" and is_table else "linear")
    encoder = make("encoder")
    return encoder if output == "linear" else BoundedEncoder(encoder, output)


def _make_linear(make: MakeEncoder) -> nn.Module:
    """Makes an encoder that flattens its input and has one linear layer, which PCA fills and later
    split training updates.
    """
    if make.spec.cardinalities:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: objective = 'pca' needs numeric inputs, but the encoder of "
            f"{make.party} embeds categories. Set its encoder to kind = 'mlp', which makes "
            "columns of them.",
        )
    return replace(make, settings=MlpSettings(hidden=()))("encoder")


def get_training_rows(party: Party, phase: str, split: str) -> Rows:
    """Returns the rows of a split. Raises InputError if the split has fewer than two rows."""
    rows = party.rows.get(split)
    if len(rows) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: {party.name} needs at least 2 rows to learn from (got "
            f"{len(rows)}). Add rows, or make the other splits smaller.",
        )
    return rows


def divergence_error(party: Party, phase: str) -> InputError:
    """Returns the error for a training that has diverged. No peer can notice this, because nothing
    is sent.
    """
    return InputError(
        Code.NON_FINITE,
        f"phase {phase}: the encoder of {party.name} gives NaN or infinity, because its training "
        "diverged. Lower the learning rate.",
    )


def check_finite(loss: float, party: Party, phase: str) -> float:
    """Returns ``loss`` unchanged. Raises InputError if it is NaN or infinite, which no other party
    could notice.
    """
    if not math.isfinite(loss):
        raise divergence_error(party, phase)
    return loss


def make_own_batches(party: Party, phase: str, epoch: int, n: int, size: int) -> list[Rows]:
    """Returns the batches of an epoch over positions 0 to n - 1, in an order that only this party
    knows.
    """
    seed = derive_seed(party.own_seed, party.name)
    return batches(seed, phase, epoch, np.arange(n, dtype=np.int64), size)


class LocalTraining:
    """Trains a module with an optimizer, a schedule and, with ``dp``, private steps.

    ``n``: the number of rows to learn from; batches contain positions 0 to n - 1.
    """

    def __init__(
        self, party: Party, phase: str, settings: FedOnceSettings, module: nn.Module, n: int
    ) -> None:
        self._party, self._phase, self._settings, self._module, self._n = (
            party,
            phase,
            settings,
            module,
            n,
        )
        self._params = list(module.parameters())
        party_optimizer = own_optimizer(party.recipe, phase, party.name, settings.optimizers)
        self._optimizer_settings = party_optimizer or settings.optimizer or ADAM
        self._optimizer = build_optimizer(self._optimizer_settings, self._params)
        self._schedule = build_schedule(self._optimizer_settings, self._optimizer, settings.epochs)
        self._private: PrivateSteps | None = None
        if settings.dp is not None:
            rows, size, norm = (
                np.arange(n, dtype=np.int64),
                settings.batch_size,
                settings.dp.max_grad_norm,
            )
            trained = module, self._optimizer, rows
            self._private = PrivateSteps(
                party.need_privacy(), phase, party.name, *trained, size, norm
            )

    def run_epoch(self, epoch: int, loss: Callable[[Rows], Tensor]) -> RoundReport:
        """Runs an epoch. Reports the mean loss and, with ``dp``, the ε spent so far."""
        party, settings, private = self._party, self._settings, self._private
        if private is not None and private.note:
            # An earlier epoch used up the privacy budget.
            return RoundReport(0)
        batches: Iterable[Rows]
        if private is not None:
            batches, count = private.batches(epoch), private.batches_an_epoch
        else:
            batches = make_own_batches(party, self._phase, epoch, self._n, settings.batch_size)
            count = len(batches)
        total, steps, num_losses = torch.zeros((), device=party.device), 0, 0
        self._module.train()
        for steps, batch in enumerate(batches, 1):
            batch_loss = (
                private.step(batch, loss) if private is not None else self._step(batch, loss)
            )
            if batch_loss is not None:
                total += batch_loss
                num_losses += 1
            party.hooks.tick(self._phase, epoch, settings.epochs, steps, count)
        if steps:
            self._schedule.step()
        metrics = (
            {"loss": check_finite(total.item() / num_losses, party, self._phase)}
            if num_losses
            else {}
        )
        if private is not None:
            return RoundReport(
                steps, {"local": {**metrics, "epsilon": private.epsilon}}, note=private.note
            )
        return RoundReport(steps, {"local": metrics})

    def _step(self, batch: Rows, loss: Callable[[Rows], Tensor]) -> Tensor:
        value = loss(batch)
        self._optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        clip(self._optimizer_settings, self._params)
        # Alg. 1, line 9: update the encoder.
        self._optimizer.step()
        return value.detach()

    def close(self) -> None:
        """Ends the private training, if there is any."""
        if self._private is not None:
            self._private.close()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        steps = (
            {"private": self._private.state()}
            if self._private
            else {"optimizer": self._optimizer.state_dict()}
        )
        return {**steps, "schedule": self._schedule.state_dict()}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        if self._private is not None:
            self._private.load_state(tree["private"])
        else:
            self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])


class Reconstruction:
    """Trains the encoder together with a decoder that is discarded after the phase."""

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party = party
        self._rows = get_training_rows(party, phase, settings.rows)
        self._encoder = party.models["encoder"]
        self._cardinalities = party.rows.need_features().spec.cardinalities
        width = self._collect_targets(party.rows.need_features().inputs(self._rows[:1])).shape[1]
        with seed_torch(derive_seed(party.own_seed, "init", phase, party.name, "decoder")):
            decoder = build_top(TopSettings(hidden=settings.decoder), party.exchanges.width, width)
        self._decoder = decoder.to(party.device)
        autoencoder = nn.ModuleDict({"encoder": self._encoder, "decoder": self._decoder})
        self._training = LocalTraining(party, phase, settings, autoencoder, len(self._rows))

    def _collect_targets(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Returns the values to reconstruct, [B, F]: the numbers, and the categories as one-hot
        vectors.
        """
        columns = [inputs[0].flatten(1)]
        for column, values in enumerate(self._cardinalities):
            columns.append(F.one_hot(inputs[1][:, column], values).to(inputs[0].dtype))
        return torch.cat(columns, dim=1)

    def run_round(self, epoch: int) -> RoundReport:
        """Runs one epoch and reports the mean squared error."""
        features = self._party.rows.need_features()

        def loss(batch: Rows) -> Tensor:
            inputs = features.inputs(self._rows[batch])
            (z_BD,) = self._party.encode.through(self._encoder, inputs)
            return F.mse_loss(self._decoder(z_BD), self._collect_targets(inputs))

        return self._training.run_epoch(epoch, loss)

    def close(self) -> None:
        """Ends the private training, if there is any."""
        self._training.close()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"decoder": dict(self._decoder.state_dict()), **self._training.state()}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._decoder.load_state_dict(tree["decoder"])
        self._training.load_state(tree)


log = logging.getLogger(__name__)


def principal_components(x_NF: Tensor, d: int) -> tuple[Tensor, Tensor, float]:
    """Returns the mean [F], the d directions of largest variance [d, F], and the share of the
    variance that these explain.

    Computes in float64. The sign of a direction is chosen so that its largest loading is positive.
    """
    x_NF = x_NF.double()
    mean_F = x_NF.mean(dim=0)
    _, singular, directions_KF = torch.linalg.svd(x_NF - mean_F, full_matrices=False)
    axes_DF = directions_KF[:d]
    largest = axes_DF.gather(1, axes_DF.abs().argmax(dim=1, keepdim=True))
    variances = singular.square()
    return (
        mean_F,
        axes_DF * largest.sign(),
        (variances[:d].sum() / variances.sum().clamp_min(1e-300)).item(),
    )


class Pca:
    """Fits the party's encoder, one linear layer, in one round: z = axes (x - mean).

    The active party sets ``embedding_size`` without knowing how many columns the passive parties
    have. So the numbers of z beyond a party's components are 0.
    """

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._rows = party, get_training_rows(party, phase, settings.rows)
        linear = list(party.models["encoder"].modules())[-1]
        d = party.exchanges.width
        if (
            not isinstance(linear, nn.Linear)
            or len(list(party.models["encoder"].parameters())) != 2
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: objective = 'pca' turns the encoder into one linear "
                "layer, but an earlier phase needs another encoder. Remove one of the two phases.",
            )
        max_components = min(linear.in_features, len(self._rows) - 1)
        if d > max_components:
            # This is only logged, because a report would reveal the number of columns to the
            # server.
            log.warning(
                "phase %s: %s has %d columns and %d rows, which give %d principal components: the "
                "other %d of the embedding_size = %d numbers are 0",
                *(
                    phase,
                    party.name,
                    linear.in_features,
                    len(self._rows),
                    max_components,
                    d - max_components,
                    d,
                ),
                extra={"event": "advice"},
            )
        self._max_components = max_components
        self._linear = linear

    @torch.no_grad()
    def run_round(self, _round: int) -> RoundReport:
        """Fits the components and reports the share of the variance that they explain."""
        (x,) = self._party.rows.need_features().inputs(self._rows)
        d = min(self._linear.out_features, self._max_components)
        mean_F, axes_DF, share = principal_components(x.flatten(1), d)
        self._linear.weight.zero_()[:d] = axes_DF
        self._linear.bias.zero_()[:d] = -axes_DF @ mean_F
        return RoundReport(0, {"local": {"variance": share}})

    def close(self) -> None:
        """Does nothing."""

    def state(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Does nothing."""
        _ = tree


def draw_targets(n: int, d: int, seed: int) -> Tensor:
    """Returns targets C [n, d]: rows of N(0, 1), each scaled to norm 1."""
    return F.normalize(torch.randn(n, d, generator=generator(seed)))


def match_targets(z_BD: Tensor, c_BD: Tensor) -> npt.NDArray[np.int64]:
    """Returns the permutation P of line 5, [B], for which ``c_BD[P]`` has the smallest sum of
    squared distances from ``z_BD``.

    The Hungarian algorithm takes time in proportion to about B³: 3 ms for B = 100 and d = 3 on one
    core, and 40 times as long for B = 512. Raises ValueError if a distance is not finite.
    """
    # Imported here, so that other parties and methods do not need SciPy.
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    cost_BB = cdist(
        z_BD.detach().cpu().double().numpy(), c_BD.detach().cpu().double().numpy(), "sqeuclidean"
    )
    _, columns = linear_sum_assignment(cost_BB)
    return np.asarray(columns, dtype=np.int64)


def nat_loss(z_BD: Tensor, c_BD: Tensor) -> Tensor:
    """Returns the loss 1 / (2 B) ‖z - c‖²_F of a batch (Alg. 1, line 6)."""
    return (z_BD - c_BD).square().sum() / (2 * len(z_BD))


class Nat:
    """Trains one party's encoder towards its targets.

    ``targets``: C_j after the matching so far, [n, D]. Row i is the target of the i-th training
    row. With ``matching`` a batch's targets are reassigned among its rows, so that a row's target
    depends on other rows. Without it every row keeps its first target.
    """

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._rows = get_training_rows(party, phase, settings.rows)
        self._encoder = party.models["encoder"]
        self._training = LocalTraining(party, phase, settings, self._encoder, len(self._rows))
        seed = derive_seed(party.own_seed, phase, party.name, "targets")
        # Alg. 1, line 3: random targets.
        self.targets = draw_targets(len(self._rows), party.exchanges.width, seed).to(party.device)

    def run_round(self, epoch: int) -> RoundReport:
        """Runs one epoch (Alg. 1, line 4). Reports the mean loss, and the share of rows whose
        target has changed.
        """
        party, settings, features = self._party, self._settings, self._party.rows.need_features()
        matching = settings.matches and epoch % settings.match_every == 0
        moved = 0

        def loss(batch: Rows) -> Tensor:
            nonlocal moved
            (z_BD,) = party.encode.through(self._encoder, features.inputs(self._rows[batch]))
            c_BD = party.rows.take(self.targets, batch)
            if matching:
                # Alg. 1, line 5: match the targets to the embeddings.
                order = self._match(z_BD, c_BD)
                moved += int((order != np.arange(len(order))).sum())
                c_BD = party.rows.take(c_BD, order)
                self.targets[torch.from_numpy(batch).to(party.device)] = c_BD
            # Alg. 1, line 6: the loss.
            return nat_loss(z_BD, c_BD)

        report = self._training.run_epoch(epoch, loss)
        if matching and report.steps:
            report.metrics["local"]["moved"] = moved / len(self._rows)
        return report

    def close(self) -> None:
        """Ends the private training, if there is any."""
        self._training.close()

    def _match(self, z_BD: Tensor, c_BD: Tensor) -> npt.NDArray[np.int64]:
        try:
            return match_targets(z_BD, c_BD)
        except ValueError:
            # SciPy raises ValueError for NaN, before the loss is checked.
            raise divergence_error(self._party, self._phase) from None

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"targets": self.targets, **self._training.state()}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self.targets = tree["targets"].to(self._party.device)
        self._training.load_state(tree)


class EncoderLearner(Protocol):
    """Learns an encoder without labels. The job saves the encoder's weights, so ``state`` does not
    contain them.
    """

    def run_round(self, round_: int) -> RoundReport: ...
    def close(self) -> None: ...
    def state(self) -> Tree: ...
    def load_state(self, tree: Tree) -> None: ...


class ContrastiveLearner:
    """Learns with SimCLR's loss on two views of each row, as SS-VFL does; see
    ``vfl_party.selfsup``.
    """

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._phase, self._rounds = party, phase, settings.epochs
        self._warned: set[str] = set()
        selfsup = SelfSupSettings(
            ssl="simclr",
            rounds=settings.epochs,
            batch_size=settings.batch_size,
            projector=settings.projector,
            temperature=settings.temperature,
            optimizer=own_optimizer(party.recipe, phase, party.name, settings.optimizers)
            or settings.optimizer,
            augment=settings.augment,
        )
        plan = make_plan(selfsup, party.recipe.preset)
        tower = build_tower(party, phase, "local", party.models["encoder"], plan, shared=False)
        self._local = LocalSelfSup(
            party, phase, plan, tower, epochs=settings.epochs, split=settings.rows
        )

    def run_round(self, round_: int) -> RoundReport:
        """Trains for one round."""
        tick = self._party.hooks.make_ticker(
            self._phase, round_, self._rounds, self._local.steps(1)
        )
        return report(self._party.name, {"local": self._local.run(round_, 1, tick)}, self._warned)

    def close(self) -> None:
        """Does nothing."""

    def state(self) -> Tree:
        """Returns the state for a checkpoint."""
        return self._local.state()

    def load_state(self, tree: Tree) -> None:
        """Restores a state that ``state`` returned."""
        self._local.load_state(tree)


_LEARNERS: dict[str, Callable[[Party, str, FedOnceSettings], EncoderLearner]] = {
    "nat": Nat,
    "pca": Pca,
    "reconstruction": Reconstruction,
    "contrastive": ContrastiveLearner,
}


class FedOnce(Phase):
    """Runs Alg. 1, lines 2 to 15. A party without features does nothing. The active party trains
    only if ``active`` is set.
    """

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: FedOnceSettings) -> None:
        self.name = name
        self.rounds = self.epochs = 1 if settings.objective == "pca" else settings.epochs
        learns = party.name != party.recipe.active.name or settings.active
        self._learner: EncoderLearner | None = None
        if learns and party.rows.features is not None:
            self._learner = _LEARNERS[settings.objective](party, name, settings)

    def run_round(self, round_: int) -> RoundReport:
        return RoundReport(0) if self._learner is None else self._learner.run_round(round_)

    def finish(self) -> None:
        if self._learner is not None:
            self._learner.close()

    def state(self) -> Tree:
        return {} if self._learner is None else self._learner.state()

    def load_state(self, tree: Tree) -> None:
        if self._learner is not None:
            self._learner.load_state(tree)
