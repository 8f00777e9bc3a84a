"""Checks, on this machine, that a row's scores do not depend on the other rows in its batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vfl_common.config.models import PluginCombination
from vfl_party.base.devices import get_real_dtype
from vfl_party.models import combine, forward
from vfl_party.models.halves import Tail
from vfl_party.models.losses import scores
from vfl_party.models.row_blocks import (
    Blocks,
    Compute,
    Inputs,
    describe_inexact,
    find_blocks,
    sample_rows,
)
from vfl_party.models.top import learnt_stand_ins
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import SOLO

# The name, in the result, of the function that computes scores from outputs.
LINK = "link"

log = logging.getLogger(__name__)


@torch.no_grad()
def blocks_of(party: Party) -> dict[str, Blocks]:
    """Checks the models with which a party scores rows, in evaluation mode. Returns {model: the
    blocks in which to compute its rows}.

    The sample rows are drawn from a fixed seed, so that a prediction and a served model on the same
    machine get the same blocks. The result is logged.
    """
    began_s = time.perf_counter()
    for model in party.models.values():
        model.eval()
    # A plug-in's model may draw random numbers, which must not change torch's generator.
    with torch.random.fork_rng(devices=[]):
        models = _yield_models(party)
        blocks = {name: find_blocks(compute, samples) for name, compute, samples in models}
    if not party.encode.on_one_device and "encoder" in blocks:
        why = "several processes compute embeddings, so rows are not checked"
        blocks["encoder"] = replace(blocks["encoder"], why=why)
    sizes = {name: [model_blocks.rows, model_blocks.most] for name, model_blocks in blocks.items()}
    took_ms = round(1000 * (time.perf_counter() - began_s), 1)
    facts = {"event": "exact", "exact": True, "blocks": sizes, "took_ms": took_ms}
    if why := describe_inexact(blocks):
        text = "a row's scores may depend in their last bits on the rows scored with it (%s)"
        log.warning(text, why, extra={**facts, "exact": False})
    else:
        log.info("a row's scores do not depend on the rows scored with it", extra=facts)
    return blocks


def _yield_models(party: Party) -> Iterator[tuple[str, Compute, list[Inputs]]]:
    """Yields, for each of a party's models, its name, the function that computes it, and samples of
    its inputs.
    """
    models, recipe = party.models, party.recipe
    random = np.random.Generator(np.random.Philox(key=0))

    def normal(*shape: int) -> Tensor:
        size = (sample_rows(shape), *shape)
        sample = random.standard_normal(size, dtype=np.float32)
        return torch.from_numpy(sample).to(party.device, get_real_dtype())

    tail, precision = models.get("tail"), recipe.model.precision
    if party.rows.features is not None and "encoder" in models:
        spec = party.rows.features.spec
        inputs = [normal(*spec.shape)]
        if spec.cardinalities:
            codes = random.integers(
                0, spec.cardinalities, (len(inputs[0]), len(spec.cardinalities))
            )
            inputs.append(torch.from_numpy(codes).to(party.device))
        is_split = recipe.own_rows or tail is not None
        yield "encoder", models["encoder"] if is_split else party.encode, [tuple(inputs)]
        if SOLO in models:
            solo = partial(forward, models[SOLO], precision=precision)
            yield SOLO, solo, [tuple(inputs)]
    if isinstance(tail, Tail):
        latents = normal(*tail.latent)
        yield "tail", tail.features, [(latents,)]
        width = tail.features(latents[:1]).shape[1]
        yield "top", party.outputs, [(normal(width),)]
    elif "top" in models:
        yield "top", party.outputs, [(sample,) for sample in _make_samples(party, normal)]
    if party.role == "active":
        outputs = normal(recipe.task.outputs).double()
        yield LINK, partial(scores, recipe.task), [(outputs,)]


def _make_samples(party: Party, normal: Callable[[int], Tensor]) -> list[Tensor]:
    """Returns samples of the top model's inputs: combined from all parties' embeddings, and from
    fewer embeddings if the model gets fewer when parties are missing.
    """
    rule = party.recipe.model.combine
    widths = [party.recipe.embedding_size(p.name) for p in party.recipe.modelled if p.features]
    embeddings = [normal(width) for width in widths]
    stacked = rule == "attention" or isinstance(rule, PluginCombination)
    leaves_out = (
        stacked and party.course.without == "skip" and learnt_stand_ins(party.models) is None
    )
    counts = range(1, len(widths) + 1) if leaves_out else [len(widths)]
    return [combine(rule, embeddings[:count]) for count in counts]
