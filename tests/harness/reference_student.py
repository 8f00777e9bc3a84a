"""A solo student in one process, from the method's page: the reference of the exactness tests.

It shares no transport, phases, losses or optimizers with the product. It shares what both must
start from: models as built, seeds, order of batches, tables and their preprocessing. Settings are
as in TOML.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.harness.reference import Updates, one_thread
from tests.harness.reference_task import losses_of_rows
from vfl_common.config.data import DataSettings
from vfl_common.config.models import TopSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches, derive_seed, split_rows
from vfl_party.data import Labels, Preprocessor, load_table
from vfl_party.models import build_encoder, build_top, seed_torch

# Of FedOnce with ``output = "tanh"``.
BOUND = "encoder.body"


def train(
    recipe_tables: dict[str, Any],
    data: dict[str, dict[str, Any]],
    joint: dict[str, dict[str, Tensor]],
    *,
    taught: bool = True,
) -> dict[str, Tensor]:
    """Returns the student's weights, {"encoder.…", "top.…", "match.…": tensor}.

    ``joint``: {party: {"encoder.…", "top.…": tensor}}, the trained joint model, of any phase; of
    MLPs that are concatenated. ``taught``: False for the same model without a teacher.
    """
    recipe = Recipe.model_validate(recipe_tables)
    phase = next(each for each in recipe.phases if each.kind == "student")
    settings = phase.settings
    with one_thread():
        z, own_x, own_spec, splits, y = [], None, None, {}, None
        for party in recipe.parties:
            said = DataSettings(**data[party.name])
            table = load_table(said, with_label=party.role == "active")
            splits = split_rows(
                recipe.seed,
                len(table.ids),
                validation=recipe.rows.validation,
                test=recipe.rows.test,
                aligned=recipe.rows.aligned,
                labelled=recipe.rows.labelled,
            )
            fitted = Preprocessor.fit(
                table, splits["local"], one_hot=True, flatten=True, settings=said
            )
            features = fitted.transform(table)
            width = recipe.embedding_size(party.name)
            weights = joint[party.name]
            networks = _networks(weights)
            for network in networks:
                kind = recipe.model.encoder
                encoder = build_encoder(kind, features.spec, width // len(networks))
                _load(encoder, network, weights)
                found = encoder.eval()(features.x).detach()
                z.append(found.tanh() if network == BOUND else found)
            if party.role == "active":
                own_x, own_spec, name = features.x, features.spec, party.name
                assert table.labels is not None
                raw = table.labels
                if said.beside:
                    raw = np.stack([raw, *(table.beside[each] for each in said.beside)], axis=1)
                labels = Labels.fit(
                    raw, recipe.task, splits["train"], source="reference", names=said.labels
                )
                y = labels.encode(raw)
        h = torch.cat(z, dim=1)
        top = build_top(recipe.model.top, h.shape[1], recipe.task.outputs)
        _load(top, "top", joint[name])
        t = top.eval()(h).detach()
        assert own_x is not None
        assert y is not None
        model = _student(recipe, settings, name, own_spec, h.shape[1])
        own = np.setdiff1d(splits["local"], splits["aligned"])
        own = own[:0] if recipe.rows.labelled is not None else own
        labelled = np.union1d(splits["train"], own)
        both = np.union1d(splits["aligned"], own)
        passes = 1 if taught else -(-len(both) // len(labelled))
        rows = both if taught else labelled
        known, asked = ({int(r) for r in each} for each in (labelled, splits["aligned"]))
        updates = Updates(settings.get("optimizer", {}), list(model.parameters()), 1)
        model.train()
        for epoch in range(settings["epochs"] * passes):
            for batch in batches(recipe.seed, phase.name, epoch, rows, settings["batch_size"]):
                total = torch.zeros(())
                at = torch.from_numpy(batch)
                e = model["encoder"](own_x[at])
                s = model["top"](e)
                for b, row in enumerate(batch):
                    one = slice(b, b + 1)
                    if int(row) in known:
                        total = total + losses_of_rows(recipe.task, s[one], y[row : row + 1]).sum()
                    if taught and int(row) in asked:
                        T = settings.get("temperature", 1.0)
                        apart = _apart(recipe.task.kind, s[b], t[row], T)
                        total = total + settings.get("weight", 1.0) * apart
                    if taught and int(row) in asked and "match" in model:
                        gone = ((model["match"](e[one])[0] - h[row]) ** 2).mean()
                        total = total + settings["match"] * gone
                updates.by(total / len(batch))
    return dict(model.state_dict())


def _apart(kind: str, s: Tensor, t: Tensor, T: float) -> Tensor:
    """T² · KL(teacher ‖ student) of one row's outputs, or their squared distance."""
    if kind == "regression":
        return ((s - t) ** 2).mean()
    if kind == "multiclass":
        p, q = (t / T).softmax(0), (s / T).softmax(0)
        return T**2 * (p * (p.log() - q.log())).sum()
    p, q = (t / T).sigmoid(), (s / T).sigmoid()
    each = p * (p.log() - q.log()) + (1 - p) * ((1 - p).log() - (1 - q).log())
    return T**2 * each.mean()


def _student(
    recipe: Recipe, settings: dict[str, Any], name: str, spec: Any, joint: int
) -> nn.ModuleDict:
    width = settings.get("embedding_size", recipe.embedding_size(name))
    model = nn.ModuleDict()
    with seed_torch(derive_seed(recipe.seed, "init", name, "solo")):
        model["encoder"] = build_encoder(recipe.model.encoder, spec, width)
    with seed_torch(derive_seed(recipe.seed, "init", name, "solo top")):
        top = TopSettings.model_validate(settings.get("top", {}))
        model["top"] = build_top(top, width, recipe.task.outputs)
        if settings.get("match"):
            model["match"] = nn.Linear(width, joint)
    return model


def _networks(weights: dict[str, Tensor]) -> list[str]:
    """Returns the beginnings of the names of an encoder's weights: FedCVT has two networks side by
    side, and FedOnce bounds what its own gives.
    """
    for names in (["encoder.unique", "encoder.shared"], [BOUND]):
        if any(key.startswith(f"{names[0]}.") for key in weights):
            return names
    return ["encoder"]


def _load(model: nn.Module, part: str, weights: dict[str, Tensor]) -> None:
    start = f"{part}."
    model.load_state_dict({k[len(start) :]: v for k, v in weights.items() if k.startswith(start)})
