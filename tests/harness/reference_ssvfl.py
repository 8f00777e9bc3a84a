"""SS-VFL-I in one process, from Algorithms 1 and 4 of the paper: local contrastive learning, then a
head.

As in ``reference_fedhssl``, it shares no transport, phases or losses with the product; views are
inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.harness.present import present
from tests.harness.reference import Updates, one_thread, own_table, width_of
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches, derive_seed, split_rows
from vfl_party.data import Labels, Preprocessor, load_table
from vfl_party.models import build_encoder, build_top, seed_torch
from vfl_party.selfsup.augment import make_augment
from vfl_party.selfsup.settings import AugmentSettings


def train(
    recipe_tables: dict[str, Any], data: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Tensor]]:
    """Trains ``contrastive`` (simclr) and ``head`` (Adam); returns {party: {"encoder.…": tensor,
    "top.…": tensor}}.
    """
    recipe = Recipe.model_validate(recipe_tables)
    pretraining, head = recipe.phases[:2]
    found: dict[str, dict[str, Tensor]] = {}
    representations = []
    with one_thread():
        for party in recipe.parties:
            settings = DataSettings(**data[party.name])
            table = load_table(settings, with_label=party.role == "active")
            rows = recipe.rows
            splits = split_rows(
                recipe.seed,
                len(table.ids),
                validation=rows.validation,
                test=rows.test,
                aligned=rows.aligned,
                labelled=rows.labelled,
            )
            fitted = Preprocessor.fit(
                table,
                splits["local"],
                one_hot=True,
                flatten=recipe.model.encoder.kind == "mlp",
                settings=settings,
            )
            features = fitted.transform(table)
            encoder = _contrast(
                recipe,
                pretraining.name,
                pretraining.settings,
                party.name,
                features,
                splits["local"],
            )
            encoder.eval()
            with torch.no_grad():
                # Alg. 1, line 4.
                representations.append(encoder(*features.inputs(splits["train"])))
            found[party.name] = {
                f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()
            }
            if party.role == "active":
                labels = Labels.fit(table.labels, recipe.task, splits["train"], source="reference")
                y, active = (
                    labels.encode(present(table.labels))[torch.from_numpy(splits["train"])],
                    party.name,
                )
        top = _head(recipe, head.name, head.settings, torch.cat(representations, dim=1), y)
    found[active] |= {f"top.{name}": tensor for name, tensor in top.state_dict().items()}
    return found


def _contrast(
    recipe: Recipe, phase: str, settings: dict[str, Any], name: str, features: Any, rows: Any
) -> nn.Module:
    """Runs LocalCL of Algorithm 4, with SimCLR's loss."""
    with seed_torch(derive_seed(recipe.seed, "init", name, "encoder")):
        encoder = build_encoder(recipe.model.encoder, features.spec, width_of(recipe, name))
    width = width_of(recipe, name)
    layers: list[nn.Module] = []
    with seed_torch(derive_seed(recipe.seed, "init", phase, name, "local")):
        for number, size in enumerate(settings["projector"]):
            layers += [nn.ReLU()] if number else []
            layers += [nn.Linear(width, size, bias=False), nn.BatchNorm1d(size)]
            width = size
    network = nn.Sequential(encoder, *layers)
    size, lr = settings["batch_size"], 0.05 * settings["batch_size"] / 256
    sgd = {"kind": "sgd", "momentum": 0.9, "weight_decay": 3e-5, "lr": lr, "schedule": "cosine"}
    table = own_table(settings, name, sgd)
    optimizer = Updates(table, list(network.parameters()), settings["rounds"])
    augment = make_augment(AugmentSettings(), features, rows)
    own = derive_seed(recipe.seed, name)
    for epoch in range(settings["rounds"]):
        random = torch.Generator().manual_seed(
            derive_seed(recipe.seed, "augment", phase, name, epoch)
        )
        for batch in batches(own, phase, epoch, rows, size):
            if len(batch) < size:
                continue
            views = augment.two_views(features.inputs(batch), random)
            loss = _simclr(network(*views[0]), network(*views[1]), settings["temperature"])
            optimizer.by(loss)
        optimizer.end_epoch()
    return encoder


def _simclr(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Returns SS-VFL's Eq. 1 for every row of both views; the negatives are all other rows of the
    batch.
    """
    z = torch.cat([F.normalize(first), F.normalize(second)])
    similar = (z @ z.T / temperature).exp()
    n = len(first)
    losses = []
    for i in range(2 * n):
        others = similar[i].sum() - similar[i, i]
        losses.append(-(similar[i, (i + n) % (2 * n)] / others).log())
    return torch.stack(losses).mean()


def _head(recipe: Recipe, phase: str, settings: dict[str, Any], r: Tensor, y: Tensor) -> nn.Module:
    """Runs Algorithm 1, lines 6 to 10."""
    with seed_torch(derive_seed(recipe.seed, "init", recipe.active.name, "top")):
        top = build_top(recipe.model.top, r.shape[1], recipe.task.outputs)
    optimizer = Updates(settings["optimizer"], list(top.parameters()), settings["epochs"])
    for epoch in range(settings["epochs"]):
        for batch in batches(
            recipe.seed, phase, epoch, torch.arange(len(y)).numpy(), settings["batch_size"]
        ):
            chosen = torch.from_numpy(batch)
            loss = F.cross_entropy(top(r[chosen]), y[chosen])
            optimizer.by(loss)
        optimizer.end_epoch()
    return top
