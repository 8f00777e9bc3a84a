"""Implements rank 0's side: an encoder that runs on all of the party's GPUs and is called like any
encoder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.data.inputs.made import BatchLog, BatchOrigin, Views
from vfl_party.models import InputSpec, StochasticEncoder
from vfl_party.models.training import Precision
from vfl_party.ranks.group import IntegerArray, Ranks, Word, convert_rank_errors, divide_rows
from vfl_party.ranks.spread import OnRanks, describe_structure, trains


class SpreadEncoder:
    """Embeds batches on all ranks, and sends each rank its share of the gradient.

    Each generation makes one ``SpreadEncoder``, after ``begin_ranks``. The other ranks make each
    batch from their own copy of the rows. They receive row positions, the state for drawing random
    views, and the weights of rank 0's encoders. After a backward pass, rank 0's encoders have the
    gradients of the whole batch.

    Args:
        encoder: The party's encoder. ``through`` accepts other encoders.
        noted: The log of how the batches of the party's features were made.
    """

    on_one_device = False

    def __init__(
        self,
        ranks: Ranks,
        encoder: nn.Module,
        spec: InputSpec,
        precision: Precision,
        noted: BatchLog,
    ) -> None:
        self._ranks, self._spec, self._precision, self._noted = ranks, spec, precision, noted
        # Encoders are found by identity, so a reference to each original is kept.
        self._shared: list[tuple[nn.Module, OnRanks]] = []
        self._views: list[Views] = []
        self._encoder = encoder
        with convert_rank_errors():
            self._get_number(encoder)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Embeds the whole batch, [B, …], as float32 [B, D]."""
        return self.through(self._encoder, inputs)[0]

    def through(self, encoder: nn.Module, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Embeds batches of the same size, one after the other, with an encoder of the party's
        kind. Returns float32 [B, D] for each batch.
        """
        ranks, learns = self._ranks, torch.is_grad_enabled()
        number = self._get_number(encoder)
        rows, count = len(batches[0][0]), len(batches)
        batch_facts, arrays = self._describe_batches(batches)
        facts = {
            "encoder": number,
            "batches": batch_facts,
            "training": encoder.training,
            "learns": learns,
            "seed": _derive_rank_seed(ranks.device) if encoder.training else 0,
        }
        ranks.send_command(Word.FORWARD, facts, arrays)
        original, shared = self._shared[number]
        ranks.spread(original)
        sizes = divide_rows(rows, ranks.size)
        own_batches = [tuple(x[: sizes[0]] for x in inputs) for inputs in batches]
        z: Tensor = _Gather.apply(
            shared(own_batches), ranks, number, [count * size for size in sizes]
        )
        if count == 1:
            return [z]
        # The parts are ordered by rank, and within a rank by batch.
        parts = torch.split(z, [size for size in sizes for _ in range(count)])
        return [torch.cat(parts[place::count]) for place in range(count)]

    def _get_number(self, encoder: nn.Module) -> int:
        """Returns the number of an encoder. For a new encoder, the other ranks make a copy."""
        for number, (original, _) in enumerate(self._shared):
            if original is encoder:
                return number
        learns = trains(encoder)
        self._ranks.send_command(
            Word.ENCODER, {"structure": describe_structure(encoder), "trains": learns}
        )
        shared = OnRanks(self._ranks, encoder, self._spec, self._precision, trains=learns)
        self._shared.append((encoder, shared))
        return len(self._shared) - 1

    def _describe_batches(
        self, batches: tuple[tuple[Tensor, ...], ...]
    ) -> tuple[list[Any], list[IntegerArray]]:
        """Describes how the batches were made, in the format that ``RankRows`` of the other ranks
        reads.
        """
        batch_facts: list[Any] = []
        arrays: list[IntegerArray] = []
        for inputs in batches:
            origin = self._noted.of(inputs)
            if origin is None:
                raise InputError(
                    Code.CONFIG_INVALID,
                    "a phase changes the inputs of an encoder, which other processes of the party "
                    "cannot repeat. Start the party without torchrun.",
                )
            facts, batch_arrays = self._describe_origin(origin)
            batch_facts.append(facts)
            arrays += batch_arrays
        return batch_facts, arrays

    def _describe_origin(self, origin: BatchOrigin) -> tuple[dict[str, Any], list[IntegerArray]]:
        view = origin.view
        if view is not None:
            generator_state = view.drawn.numpy()
            number = self._get_views_number(view.of)
            return {"views": number, "which": view.which, "count": view.count}, [
                origin.rows,
                generator_state,
            ]
        if origin.others is not None:
            return {"column": origin.column}, [origin.rows, origin.others]
        return {}, [origin.rows]

    def _get_views_number(self, views: Views) -> int:
        if views not in self._views:
            facts = {"settings": json.loads(views.settings)}
            self._ranks.send_command(Word.VIEWS, facts, [views.pool.astype(np.int64)])
            self._views.append(views)
        return self._views.index(views)


class _Gather(torch.autograd.Function):
    """Gathers the ranks' embeddings, in rank order, in the forward pass. In the backward pass,
    sends each rank its rows of the gradient.

    The other ranks' backward passes run in parallel with rank 0's, and DistributedDataParallel sums
    the gradients (see ``spread``).
    """

    @staticmethod
    def forward(ctx: Any, z_BD: Tensor, ranks: Ranks, number: int, sizes: list[int]) -> Tensor:
        ctx.ranks, ctx.number, ctx.sizes = ranks, number, sizes
        all_BD = z_BD.new_empty(sum(sizes), z_BD.shape[1])
        own_part, *other_parts = torch.split(all_BD, sizes)
        own_part.copy_(z_BD)
        ranks.receive(other_parts, range(1, ranks.size))
        return all_BD

    @staticmethod
    def backward(ctx: Any, dz_BD: Tensor) -> tuple[Tensor, None, None, None]:
        own_part, *other_parts = torch.split(dz_BD, ctx.sizes)
        ctx.ranks.send_command(Word.BACKWARD, {"encoder": ctx.number})
        ctx.ranks.send(other_parts, range(1, ctx.ranks.size))
        return own_part, None, None, None


class RankGuardedPhase(Phase):
    """Wraps a phase and converts the loss of a rank into ``RankLost``, which ends this process, but
    not the run.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.name, self.rounds = phase.name, phase.rounds
        self.alone_from, self.skippable = phase.alone_from, phase.skippable
        self.lenient = phase.lenient

    def run_round(self, round_: int) -> RoundReport:
        with convert_rank_errors():
            return self._phase.run_round(round_)

    def state(self) -> Tree:
        return self._phase.state()

    def load_state(self, tree: Tree) -> None:
        self._phase.load_state(tree)

    def keep(self, folder: Path) -> None:
        self._phase.keep(folder)

    def finish(self) -> None:
        self._phase.finish()


def check_spread(
    encoder: nn.Module | None, spec: InputSpec | None, device: torch.device, party: str
) -> None:
    """Raises InputError (MODEL_INVALID) if an encoder cannot run on several ranks. The encoder must
    not have been used yet.
    """
    where = f"party {party}: several processes (torchrun)"
    if encoder is None or spec is None:
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: the party has no features, so it has no encoder to run in several "
            "processes. Start one process.",
        )
    if isinstance(encoder, StochasticEncoder):
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: mid draws embeddings in one process. Start one process, or remove mid.",
        )
    if device.type == "cpu" and any(isinstance(module, _BatchNorm) for module in encoder.modules()):
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: torch computes batch normalisation over several processes only on GPUs. "
            "Start one process, set device = 'cuda', or set batch_norm = false.",
        )
    unused = _find_unused(encoder, spec, device, where)
    if unused:
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: every trained parameter must get a gradient (got none for {unused[0]}). "
            "Remove it, or set requires_grad = False.",
        )


def _find_unused(
    encoder: nn.Module, spec: InputSpec, device: torch.device, where: str
) -> list[str]:
    """Returns the names of trained parameters that get no gradient. Raises InputError if no
    parameter is trained, or if the encoder fails on an empty batch.
    """
    trained = {
        name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad
    }
    if not trained:
        raise InputError(
            Code.MODEL_INVALID, f"{where}: the encoder has nothing to train. Start one process."
        )
    mode = encoder.training
    # In evaluation mode, the test does not change batch statistics.
    encoder.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            for rows in (0, 2):
                inputs = [torch.zeros(rows, *spec.shape, device=device)]
                if spec.cardinalities:
                    shape = (rows, len(spec.cardinalities))
                    inputs.append(torch.zeros(*shape, dtype=torch.int64, device=device))
                gradients = torch.autograd.grad(
                    encoder(*inputs).sum(), list(trained.values()), allow_unused=True
                )
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: the encoder fails on a batch of no rows, which a rank may get from a short "
            f"last batch ({problem}). Start one process.",
        ) from error
    finally:
        encoder.train(mode)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]


def _derive_rank_seed(device: torch.device) -> int:
    """Returns a seed for the other ranks' dropout. It is derived from this process's random
    generators, which checkpoints contain, without drawing from them.
    """
    digest = hashlib.sha256(torch.get_rng_state().numpy().data)
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
