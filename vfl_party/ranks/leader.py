"""Rank 0's side: an encoder on all of the party's GPUs, called like any encoder."""

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
from vfl_party.models.precision import Precision
from vfl_party.ranks.group import Ranks, Whole, Word, convert_rank_errors, shares
from vfl_party.ranks.spread import OnRanks, structure, trains


class SpreadEncoder:
    """Embeds batches on all ranks, in order, and sends their gradients back to them.

    Each generation makes one, after ``begin``. The others make each batch of their own copy of the
    rows: they receive positions, how random views are drawn, and weights. The weights are those of
    rank 0's encoders; after a backward pass these hold the gradients of the whole batch.

    Args:
        encoder: the party's own; ``through`` takes others.
        noted: remembers how the batches of the party's features are made.
    """

    def __init__(
        self,
        ranks: Ranks,
        encoder: nn.Module,
        spec: InputSpec,
        precision: Precision,
        noted: BatchLog,
    ) -> None:
        self._ranks, self._spec, self._precision, self._noted = ranks, spec, precision, noted
        # Holding the original keeps its number valid as long as it lives.
        self._shared: list[tuple[nn.Module, OnRanks]] = []
        self._views: list[Views] = []
        self._encoder = encoder
        with convert_rank_errors():
            self._number(encoder)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Embeds the whole batch, [B, …], as float32 [B, D]."""
        return self.through(self._encoder, inputs)[0]

    def through(self, encoder: nn.Module, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Embeds batches of one size with an encoder of the party's kind, one after the other: as
        float32 [B, D] each.
        """
        ranks, learns = self._ranks, torch.is_grad_enabled()
        number = self._number(encoder)
        rows, count = len(batches[0][0]), len(batches)
        made, arrays = self._describe_batches(batches)
        facts = {
            "encoder": number,
            "batches": made,
            "training": encoder.training,
            "learns": learns,
            "seed": _seed(ranks.device) if encoder.training else 0,
        }
        ranks.tell(Word.FORWARD, facts, arrays)
        original, shared = self._shared[number]
        ranks.spread(original)
        sizes = shares(rows, ranks.size)
        own = [tuple(x[: sizes[0]] for x in inputs) for inputs in batches]
        z: Tensor = _Gather.apply(shared(own), ranks, number, [count * size for size in sizes])
        if count == 1:
            return [z]
        # The parts are ordered by rank, and within a rank by batch.
        parts = torch.split(z, [size for size in sizes for _ in range(count)])
        return [torch.cat(parts[place::count]) for place in range(count)]

    def _number(self, encoder: nn.Module) -> int:
        """Returns the number of an encoder; the others make theirs when it has none yet."""
        for number, (known, _) in enumerate(self._shared):
            if known is encoder:
                return number
        learns = trains(encoder)
        self._ranks.tell(Word.ENCODER, {"structure": structure(encoder), "trains": learns})
        shared = OnRanks(self._ranks, encoder, self._spec, self._precision, trains=learns)
        self._shared.append((encoder, shared))
        return len(self._shared) - 1

    def _describe_batches(
        self, batches: tuple[tuple[Tensor, ...], ...]
    ) -> tuple[list[Any], list[Whole]]:
        """Returns how the batches were made, as ``_Rows`` of the others reads it."""
        batch_facts: list[Any] = []
        arrays: list[Whole] = []
        for inputs in batches:
            made = self._noted.of(inputs)
            if made is None:
                raise InputError(
                    Code.CONFIG_INVALID,
                    "a phase changes the inputs of an encoder, which other processes of the party "
                    "cannot repeat. Start the party without torchrun.",
                )
            facts, more = self._facts(made)
            batch_facts.append(facts)
            arrays += more
        return batch_facts, arrays

    def _facts(self, made: BatchOrigin) -> tuple[dict[str, Any], list[Whole]]:
        view = made.view
        if view is not None:
            drawn = view.drawn.numpy()
            number = self._number_of_views(view.of)
            return {"views": number, "which": view.which, "count": view.count}, [made.rows, drawn]
        if made.others is not None:
            return {"column": made.column}, [made.rows, made.others]
        return {}, [made.rows]

    def _number_of_views(self, views: Views) -> int:
        if views not in self._views:
            facts = {"settings": json.loads(views.settings)}
            self._ranks.tell(Word.VIEWS, facts, [views.pool.astype(np.int64)])
            self._views.append(views)
        return self._views.index(views)


class _Gather(torch.autograd.Function):
    """Forward: gathers the ranks' embeddings, in order. Backward: sends each rank its rows of the
    gradient.

    Their backward passes run in parallel with this one, and DistributedDataParallel sums the
    gradients (see ``reduce``).
    """

    @staticmethod
    def forward(ctx: Any, z_BD: Tensor, ranks: Ranks, number: int, sizes: list[int]) -> Tensor:
        ctx.ranks, ctx.number, ctx.sizes = ranks, number, sizes
        whole_BD = z_BD.new_empty(sum(sizes), z_BD.shape[1])
        own, *others = torch.split(whole_BD, sizes)
        own.copy_(z_BD)
        ranks.receive(others, range(1, ranks.size))
        return whole_BD

    @staticmethod
    def backward(ctx: Any, dz_BD: Tensor) -> tuple[Tensor, None, None, None]:
        own, *others = torch.split(dz_BD, ctx.sizes)
        ctx.ranks.tell(Word.BACKWARD, {"encoder": ctx.number})
        ctx.ranks.send(others, range(1, ctx.ranks.size))
        return own, None, None, None


class RankGuardedPhase(Phase):
    """A phase in which a rank may be lost. That ends this process, but not the run: see
    ``RankLost``.
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
    """Raises InputError (MODEL_INVALID) if an encoder, still unused, cannot run on several
    ranks.
    """
    where = f"party {party}: several processes (torchrun)"
    if encoder is None or spec is None:
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: has no features, so no encoder to share. Start one process.",
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
    """Returns names of parameters without a gradient. Raises InputError if none is trained, or
    if a batch of no rows fails.
    """
    trained = {
        name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad
    }
    if not trained:
        raise InputError(
            Code.MODEL_INVALID, f"{where}: the encoder has nothing to train. Start one process."
        )
    mode = encoder.training
    # Evaluation mode leaves statistics unchanged.
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


def _seed(device: torch.device) -> int:
    """Returns a seed for the others' dropout: of this process's generators, which checkpoints keep,
    without a draw.
    """
    digest = hashlib.sha256(torch.get_rng_state().numpy().data)
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
