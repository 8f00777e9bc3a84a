"""FedOnce-L0 in one process, from Algorithm 1 of the paper: the reference of the exactness tests.

It shares no transport, phases, losses or optimizers with the product. It shares what both must
start from: models as built, seeds, order of batches, tables and their preprocessing. Settings are
as in TOML; see ``train``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.harness import wiring
from tests.harness.reference import Updates, loss_of, one_thread, own_table, width_of
from tests.harness.reference_sets import loss_over_sets, vectors_of
from tests.harness.reference_task import weights_of_rows
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches, derive_seed, split_rows
from vfl_party.data import Labels, Preprocessor, load_table
from vfl_party.models import build_encoder, build_top, seed_torch


def train(
    recipe_tables: dict[str, Any],
    data: dict[str, dict[str, Any]],
    late: Collection[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
) -> dict[str, dict[str, Tensor]]:
    """Trains ``fedonce`` (nat), then ``head`` (own encoder trained).

    Returns {party: {"encoder.…": tensor, "top.…": tensor}}. ``late``: parties whose representations
    are zeros in training, and whose weights in the top model are zero afterwards. ``given``:
    {split: row numbers}, for a recipe whose rows the active party divides. ``device``: where all is
    computed.
    """
    recipe = Recipe.model_validate(recipe_tables)
    local, head = recipe.phases[:2]
    found: dict[str, dict[str, Tensor]] = {}
    uploaded: list[Tensor] = []
    with one_thread():
        for party in recipe.parties:
            settings = DataSettings(**data[party.name])
            table = load_table(settings, with_label=party.role == "active")
            splits = given or split_rows(
                recipe.seed,
                len(table.ids),
                validation=recipe.rows.validation,
                test=recipe.rows.test,
            )
            rows = splits["train"]
            kind = party.encoder or recipe.model.encoder
            flatten = kind.kind in ("mlp", "raw")
            fitted = Preprocessor.fit(
                table, splits["local"], one_hot=True, flatten=flatten, settings=settings
            )
            x = fitted.transform(table).x[torch.from_numpy(rows)].to(device)
            with seed_torch(derive_seed(recipe.seed, "init", party.name, "encoder")):
                encoder = build_encoder(
                    kind, fitted.transform(table).spec, width_of(recipe, party.name)
                )
            encoder.to(device)
            if party.role == "active":
                active, own, x_own = party.name, encoder, x
                assert table.labels is not None
                raw = table.labels
                pair = settings.event or settings.group
                if pair is not None:
                    raw = np.stack([raw, table.beside[pair]], axis=1)
                labels = Labels.fit(
                    raw, recipe.task, rows, source="reference", scale=settings.label_scale
                )
                y = labels.encode(raw)[torch.from_numpy(rows)].to(device)
                column = table.beside[settings.weight] if settings.weight is not None else None
                weights = weights_of_rows(recipe, table.labels, column, rows)
                weights = None if weights is None else weights[torch.from_numpy(rows)].to(device)
                continue
            r = _local(recipe, local.name, local.settings, party.name, encoder, x)
            r = wiring.crossed(recipe, head.name, "upload", "up", party.name, (0, 0), "z", r)
            # Lines 16 (here) and 19 (active party).
            uploaded.append(torch.zeros_like(r) if party.name in late else r)
            # Tables end in tanh, images in a linear layer.
            prefix = "encoder.body" if flatten else "encoder"
            found[party.name] = {
                f"{prefix}.{name}": tensor for name, tensor in encoder.state_dict().items()
            }
        host = _host(recipe, head.name, head.settings, own, x_own, uploaded, y, weights)
    with torch.no_grad():
        for place, party in enumerate(recipe.passives, 1):
            if party.name in late:
                widths = [width_of(recipe, each.name) for each in recipe.parties]
                at = sum(widths[:place])
                host.get_parameter("top.0.weight")[:, at : at + widths[place]] = 0.0
    found[active] = {f"encoder.{name}": tensor for name, tensor in own.state_dict().items()}
    found[active] |= host.state_dict()
    return found


def predict(
    recipe_tables: dict[str, Any],
    data: dict[str, dict[str, Any]],
    weights: dict[str, dict[str, Tensor]],
) -> Tensor:
    """Runs Algorithm 2 for all rows of a binary task on tables, with given weights and one hidden
    head layer: [N].
    """
    recipe = Recipe.model_validate(recipe_tables)
    parts = []
    for party in recipe.parties:
        settings, own = DataSettings(**data[party.name]), weights[party.name]
        table = load_table(settings, with_label=False)
        rows = split_rows(
            recipe.seed, len(table.ids), validation=recipe.rows.validation, test=recipe.rows.test
        )
        x = (
            Preprocessor.fit(table, rows["local"], one_hot=True, flatten=True, settings=settings)
            .transform(table)
            .x
        )
        body = "encoder" if party.role == "active" else "encoder.body"
        hidden = F.linear(x, own[f"{body}.1.weight"], own[f"{body}.1.bias"]).relu()
        z = F.linear(hidden, own[f"{body}.3.weight"], own[f"{body}.3.bias"])
        parts.append(z if party.role == "active" else z.tanh())
    top = weights[recipe.active.name]
    hidden = F.linear(torch.cat(parts, dim=1), top["top.0.weight"], top["top.0.bias"]).relu()
    return F.linear(hidden, top["top.2.weight"], top["top.2.bias"]).squeeze(1).sigmoid()


def _local(
    recipe: Recipe, phase: str, settings: dict[str, Any], name: str, encoder: nn.Module, x: Tensor
) -> Tensor:
    """Runs lines 3 to 16 at one passive party; returns its representations R_j."""
    n, d = len(x), width_of(recipe, name)
    bounded = x.dim() == 2

    def f(x: Tensor) -> Tensor:
        z: Tensor = encoder(x)
        return torch.tanh(z) if bounded else z

    random = torch.Generator().manual_seed(derive_seed(recipe.seed, phase, name, "targets"))
    c = torch.randn(n, d, generator=random)
    c = (c / c.pow(2).sum(dim=1, keepdim=True).sqrt()).to(x.device)
    table = own_table(settings, name, settings["optimizer"])
    optimizer = Updates(table, list(encoder.parameters()), settings["epochs"])
    for epoch in range(settings["epochs"]):
        order = batches(
            derive_seed(recipe.seed, name), phase, epoch, np.arange(n), settings["batch_size"]
        )
        encoder.train()
        for batch in order:
            at = torch.from_numpy(batch)
            z = f(x[at])
            if settings.get("matching", True) and epoch % settings.get("match_every", 1) == 0:
                ours, theirs = (each.double().numpy(force=True) for each in (z, c[at]))
                # Line 5.
                cost = ((ours[:, None, :] - theirs[None, :, :]) ** 2).sum(axis=2)
                chosen = linear_sum_assignment(cost)[1]
                c[at] = c[at][torch.from_numpy(chosen)]
            # Line 6.
            loss = torch.linalg.matrix_norm(z - c[at]) ** 2 / (2 * len(at))
            optimizer.by(loss)
        optimizer.end_epoch()
    encoder.eval()
    with torch.no_grad():
        return f(x)


def _host(
    recipe: Recipe,
    phase: str,
    settings: dict[str, Any],
    own: nn.Module,
    x: Tensor,
    r: list[Tensor],
    y: Tensor,
    weights: Tensor | None,
) -> nn.Module:
    """Runs lines 20 to 30: trains the aggregation model f_w, the active party's encoder and the
    layers after it.
    """
    width = recipe.model.embedding_size
    if recipe.model.combine == "concat":
        width = sum(width_of(recipe, each.name) for each in recipe.parties)
    with seed_torch(derive_seed(recipe.seed, "init", recipe.active.name, "top")):
        top = build_top(recipe.model.top, width, recipe.task.outputs)
    host = nn.ModuleDict({"top": top})
    vectors = vectors_of(recipe, width_of)
    if vectors is not None:
        host["stand_ins"] = vectors
    host.to(x.device)
    trained = [*own.parameters(), *host.parameters()]
    optimizer = Updates(settings["optimizer"], trained, settings["epochs"])
    own.train()
    names, step = [each.name for each in recipe.passives], 0
    for epoch in range(settings["epochs"]):
        for batch in batches(recipe.seed, phase, epoch, np.arange(len(y)), settings["batch_size"]):
            at = torch.from_numpy(batch)

            def loss(embeddings: list[Tensor], at: Tensor = at) -> Tensor:
                outputs = top(
                    torch.cat(embeddings, dim=1)
                    if recipe.model.combine == "concat"
                    else torch.stack(embeddings).mean(dim=0)
                )
                return loss_of(recipe, outputs, y[at], None if weights is None else weights[at])

            others = {name: each[at] for name, each in zip(names, r, strict=True)}
            found = loss_over_sets(recipe, host, (step,), own(x[at]), others, loss, phase=1)
            # So that a vector without effect has a gradient of zeros.
            nothing = sum((0 * each.sum() for each in host.parameters()), torch.zeros(()))
            optimizer.by(found + nothing)
            step += 1
        optimizer.end_epoch()
    return host
