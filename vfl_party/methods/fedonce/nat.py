"""Trains an encoder with noise as targets (Bojanowski and Joulin 2017), as FedOnce does (Alg. 1,
lines 3 to 9).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_party.base.phase import RoundReport
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.methods.fedonce.rows import divergence_error, get_training_rows
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.methods.fedonce.training import LocalTraining
from vfl_party.models import generator
from vfl_party.phases.context import Party


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
        self.targets = draw_targets(len(self._rows), party.embedding_size, seed).to(party.device)

    def run_round(self, epoch: int) -> RoundReport:
        """Runs one epoch (Alg. 1, line 4). Reports the mean loss, and the share of rows whose
        target has changed.
        """
        party, settings, features = self._party, self._settings, self._party.need_features()
        matching = settings.matches and epoch % settings.match_every == 0
        moved = 0

        def loss(batch: Rows) -> Tensor:
            nonlocal moved
            (z_BD,) = party.through(self._encoder, features.inputs(self._rows[batch]))
            c_BD = party.take(self.targets, batch)
            if matching:
                # Alg. 1, line 5: match the targets to the embeddings.
                order = self._match(z_BD, c_BD)
                moved += int((order != np.arange(len(order))).sum())
                c_BD = party.take(c_BD, order)
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
