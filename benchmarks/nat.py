"""Measures how long noise as targets takes: ``python -m benchmarks.nat``.

One epoch of FedOnce's local learning on 6,050 rows of 7 columns (a party's share of phishing, k =
10) with d = 3 and batches of 100, in processor time of one core, so that what else the machine does
hardly counts; and the matching of one batch. The released code needs 0.14 s, 3.4 ms of which for
each matching (measured elsewhere, on an idle machine).
"""

from __future__ import annotations

import statistics
import time

import click
import numpy as np
import torch

from vfl_common.config.models import MlpSettings
from vfl_common.config.recipe import Recipe
from vfl_party.data import Features
from vfl_party.methods.fedonce.phase import Nat, make_learnt_encoder
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.models import InputSpec
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData


def learner(rows: int, columns: int, d: int, settings: FedOnceSettings) -> Nat:
    tables = {
        "name": "nat",
        "task": {"kind": "binary"},
        "parties": [{"name": "active", "role": "active"}, {"name": "passive", "role": "passive"}],
        "model": {"embedding_size": d},
        "phases": [{"kind": "fedonce"}],
    }
    recipe = Recipe.model_validate(tables)
    make = MakeEncoder(recipe, "passive", MlpSettings(hidden=(30, 30)), InputSpec((columns,)))
    party = Party(
        name="passive",
        course=Course(recipe),
        device=torch.device("cpu"),
        models={"encoder": make_learnt_encoder(settings, make)},
        data=PartyData(
            {"train": np.arange(rows, dtype=np.int64)},
            features=Features(
                torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
            ),
        ),
    )
    return Nat(party, "fedonce", settings)


@click.command()
@click.option("--rows", default=6050, show_default=True)
@click.option("--columns", default=7, show_default=True)
@click.option("--batch-size", default=100, show_default=True)
@click.option("--size", default=3, show_default=True, help="d, the width of representations.")
@click.option("--epochs", default=5, show_default=True, help="Measured, after one that is not.")
def main(rows: int, columns: int, batch_size: int, size: int, epochs: int) -> None:
    """Prints processor seconds of an epoch with and without matching, and milliseconds of one
    matching.
    """
    torch.set_num_threads(1)
    found_s = {}
    for matching in (True, False):
        nat = learner(
            rows,
            columns,
            size,
            FedOnceSettings(batch_size=batch_size, epochs=epochs + 1, matching=matching),
        )
        nat.run_round(0)
        times_s = []
        for epoch in range(1, epochs + 1):
            began_s = time.process_time()
            nat.run_round(epoch)
            times_s.append(time.process_time() - began_s)
        found_s[matching] = statistics.median(times_s)
        what = "matched targets" if matching else "fixed targets"
        click.echo(
            f"one epoch, {what}: median {found_s[matching]:.3f} s, from {min(times_s):.3f} "
            f"to {max(times_s):.3f} s"
        )
    each_ms = 1e3 * (found_s[True] - found_s[False]) / -(-rows // batch_size)
    click.echo(f"one matching of {batch_size}: {each_ms:.2f} ms")


if __name__ == "__main__":
    main()
