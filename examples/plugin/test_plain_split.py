"""Compares a run of the method with the same training in one process, without exchanges."""

from __future__ import annotations

import numpy as np
import plain_split
import torch
from torch.nn import functional as F  # noqa: N812

import vfl
from vfl.api import batches

PARTIES, ROWS, EPOCHS, LR = ("bank", "shop"), 100, 3, 0.5
RANDOM = np.random.default_rng(1)
# Ids of one length: their order as text, which numbers the rows, is the order of the table.
ID = [f"{row:03}" for row in range(ROWS)]
TABLES = {
    name: {"id": ID} | {f"{name}{column}": RANDOM.normal(size=ROWS) for column in range(3)}
    for name in PARTIES
}
TABLES["bank"]["bad"] = (TABLES["bank"]["bank0"] * TABLES["shop"]["shop0"] > 0).astype(int)


def run(lr: float) -> vfl.Run:
    """Returns a run in which all rows are training rows, and no activation has a kink."""
    smooth = {"kind": "mlp", "hidden": [8], "activation": "tanh"}
    recipe = {
        "name": "exact",
        "seed": 1,
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "rows": {"validation": 0.0, "test": 0.0},
        "model": {"embedding_size": 4, "encoder": smooth, "top": {"hidden": []}},
        "phases": [{"kind": "plain", "epochs": EPOCHS, "batch_size": 16, "lr": lr}],
    }
    data = {name: vfl.Data(table, id="id") for name, table in TABLES.items()}
    data["bank"] = vfl.Data(TABLES["bank"], id="id", label="bad")
    return vfl.simulate(
        recipe, data, plugins={"methods": {"plain": plain_split.METHOD}}, quiet=True
    )


def train(initial: vfl.Run) -> torch.nn.ModuleDict:
    """Returns the parties' models after the method's training, from its definition: one loss of the
    joined network, and SGD.
    """
    of = {name: initial.model(name) for name in PARTIES}
    models = torch.nn.ModuleDict({name: of[name].encoder for name in PARTIES})
    models["top"] = of["bank"].top
    models.train()
    optimizer = torch.optim.SGD(models.parameters(), lr=LR)
    inputs = {name: of[name].prepare(TABLES[name]) for name in PARTIES}
    targets = torch.tensor(TABLES["bank"]["bad"], dtype=torch.float32)[:, None]
    for epoch in range(EPOCHS):
        for rows in batches(1, "plain", epoch, np.arange(ROWS), 16):
            z_BK = [models[name](*(x[rows] for x in inputs[name])) for name in PARTIES]
            logits = models["top"](torch.cat(z_BK, dim=1))
            loss = F.binary_cross_entropy_with_logits(logits, targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return models


def test_a_run_has_the_parameters_of_one_process() -> None:
    # A learning rate of 0 leaves the initial weights as they are.
    reference, trained = train(run(0.0)), run(LR)
    for name in PARTIES:
        torch.testing.assert_close(
            trained.model(name).encoder.state_dict(),
            reference[name].state_dict(),
            rtol=0,
            atol=1e-6,
        )
    top = trained.model("bank").top.state_dict()
    torch.testing.assert_close(top, reference["top"].state_dict(), rtol=0, atol=1e-6)
