"""Noise as targets (Bojanowski and Joulin 2017), as FedOnce uses it: Alg. 1, lines 3 to 9."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.optim import build_optimizer, build_schedule, clip
from vfl_common.phase import RoundReport
from vfl_common.seeds import derive_seed
from vfl_party.context import Party
from vfl_party.methods.fedonce.rows import diverged, finite, own_batches, rows_to_learn
from vfl_party.methods.fedonce.settings import ADAM, FedOnceSettings


def on_sphere(n: int, d: int, seed: int) -> Tensor:
    """Targets C [n, d]: rows of N(0, 1), each scaled to norm 1."""
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=random))


def match(z_BD: Tensor, c_BD: Tensor) -> npt.NDArray[np.int64]:
    """The permutation P of line 5, [B]: ``c_BD[P]`` has the least sum of squared distances from ``z_BD``.

    The Hungarian algorithm takes about B³: 3 ms for B = 100 and d = 3 on one core, 40 times that for B = 512. Raises
    ValueError where a distance is not finite.
    """
    from scipy.optimize import linear_sum_assignment  # other parties and methods do not pay for the import
    from scipy.spatial.distance import cdist

    cost_BB = cdist(z_BD.detach().cpu().double().numpy(), c_BD.detach().cpu().double().numpy(), "sqeuclidean")
    _, columns = linear_sum_assignment(cost_BB)
    return np.asarray(columns, dtype=np.int64)


def nat_loss(z_BD: Tensor, c_BD: Tensor) -> Tensor:
    """1 / (2 B) ‖z - c‖²_F: line 6, of a batch."""
    return (z_BD - c_BD).square().sum() / (2 * len(z_BD))


class Nat:
    """One party's encoder, its targets, and the optimizer.

    ``targets``: C_j permuted as matched so far, [n, D]; row i belongs to the i-th of the rows that are learnt from.
    With ``matching`` a batch's targets are dealt out anew among its rows and stay so: they migrate, and a row's target
    depends on other rows. Without, every row keeps the one that it drew.
    """

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._rows = rows_to_learn(party, phase, settings.rows)
        self._encoder = party.models["encoder"]
        self._params = list(self._encoder.parameters())
        self._optimize = settings.optimizer or ADAM
        self._optimizer = build_optimizer(self._optimize, self._params)
        self._schedule = build_schedule(self._optimize, self._optimizer, settings.epochs)
        seed = derive_seed(party.recipe.seed, phase, party.name, "targets")
        self.targets = on_sphere(len(self._rows), party.embedding_size, seed).to(party.device)  # line 3

    def run_round(self, epoch: int) -> RoundReport:
        """Line 4: one epoch. Tells the mean loss, and the share of the rows whose target is another one now."""
        party, settings, features = self._party, self._settings, self._party.need_features()
        matching = settings.matching and epoch % settings.match_every == 0
        batches = own_batches(party, self._phase, epoch, len(self._rows), settings.batch_size)
        total, moved = torch.zeros((), device=party.device), 0
        self._encoder.train()
        for number, batch in enumerate(batches, 1):
            z_BD = self._encoder(*features.inputs(self._rows[batch]))
            c_BD = party.take(self.targets, batch)
            if matching:
                order = self._match(z_BD, c_BD)  # line 5
                moved += int((order != np.arange(len(order))).sum())
                c_BD = party.take(c_BD, order)
                self.targets[torch.from_numpy(batch).to(party.device)] = c_BD
            loss = nat_loss(z_BD, c_BD)  # line 6
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            clip(self._optimize, self._params)
            self._optimizer.step()  # line 9
            total += loss.detach()
            party.tick(self._phase, epoch, settings.epochs, number, len(batches))
        self._schedule.step()
        found = {"loss": finite(total.item() / len(batches), party, self._phase)}
        if matching:
            found["moved"] = moved / len(self._rows)
        return RoundReport(len(batches), {"local": found})

    def _match(self, z_BD: Tensor, c_BD: Tensor) -> npt.NDArray[np.int64]:
        try:
            return match(z_BD, c_BD)
        except ValueError:  # before the loss is looked at
            raise diverged(self._party, self._phase) from None

    def state(self) -> dict[str, Any]:
        return {
            "targets": self.targets,
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        self.targets = tree["targets"].to(self._party.device)
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])
