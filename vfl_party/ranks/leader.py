"""Rank 0's side: an encoder on all of the party's GPUs, called like any encoder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.models import InputSpec, StochasticEncoder, forward
from vfl_party.models.precision import Precision
from vfl_party.ranks.group import Ranks, Word, shares, together
from vfl_party.ranks.reduce import parallel


class SpreadEncoder:
    """Embeds a batch on all ranks, in order, and sends its gradient back to them.

    Each generation makes one, and so do the other ranks. ``encoder``: the party's own, whose
    weights are the only ones that count; after a backward pass it holds the gradients of the whole
    batch.
    """

    def __init__(
        self, ranks: Ranks, encoder: nn.Module, spec: InputSpec, precision: Precision
    ) -> None:
        self._ranks, self._encoder, self._precision = ranks, encoder, precision
        with together():
            ranks.tell(Word.BEGIN, len(spec.shape), len(spec.cardinalities))
            ranks.numbers(spec.shape, len(spec.shape))
            ranks.numbers(spec.cardinalities, len(spec.cardinalities))
            self._parallel = parallel(synchronised(ranks, encoder), ranks.device, ranks.tensors)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Embeds the whole batch, [B, …], as float32 [B, D]."""
        ranks, encoder, learns = self._ranks, self._encoder, torch.is_grad_enabled()
        sizes = shares(len(inputs[0]), ranks.size)
        seed = _seed(ranks.device) if encoder.training else 0
        ranks.tell(Word.FORWARD, len(inputs[0]), encoder.training, learns, seed)
        ranks.spread(encoder)
        parts = [torch.split(x, sizes) for x in inputs]
        for x_r in parts:
            ranks.send(x_r[1:], range(1, ranks.size))
        own = tuple(x_r[0] for x_r in parts)
        z_BD = forward(self._parallel if learns else encoder, *own, precision=self._precision)
        gathered: Tensor = _Gather.apply(z_BD, ranks, sizes)
        return gathered


class _Gather(torch.autograd.Function):
    """Forward: gathers the ranks' embeddings, in order. Backward: sends each rank its rows of the
    gradient.

    Their backward passes run beside this one, and DistributedDataParallel sums the gradients (see
    ``reduce``).
    """

    @staticmethod
    def forward(ctx: Any, z_BD: Tensor, ranks: Ranks, sizes: list[int]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        whole_BD = z_BD.new_empty(sum(sizes), z_BD.shape[1])
        own, *others = torch.split(whole_BD, sizes)
        own.copy_(z_BD)
        ranks.receive(others, range(1, ranks.size))
        return whole_BD

    @staticmethod
    def backward(ctx: Any, dz_BD: Tensor) -> tuple[Tensor, None, None]:
        own, *others = torch.split(dz_BD, ctx.sizes)
        ctx.ranks.tell(Word.BACKWARD)
        ctx.ranks.send(others, range(1, ctx.ranks.size))
        return own, None, None


class Guarded(Phase):
    """A phase in which a rank may be lost. That ends this process, but not the run: see
    ``RankLost``.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.name, self.rounds = phase.name, phase.rounds
        self.alone_from, self.skippable, self.lenient = (
            phase.alone_from,
            phase.skippable,
            phase.lenient,
        )

    def run_round(self, round_: int) -> RoundReport:
        with together():
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
            f"{where}: it has no features, so no encoder to share; start one process",
        )
    if isinstance(encoder, StochasticEncoder):
        raise InputError(
            Code.MODEL_INVALID,
            f"{where}: mid draws embeddings in one process; start one, or remove mid",
        )
    if device.type == "cpu" and any(isinstance(module, _BatchNorm) for module in encoder.modules()):
        text = (
            f"{where}: batch normalisation is over the whole batch, which torch can do only "
            "across GPUs"
        )
        raise InputError(
            Code.MODEL_INVALID,
            f"{text}; start one process, take device = 'cuda', or set batch_norm = false",
        )
    unused = _unused(encoder, spec, device, where)
    if unused:
        text = (
            f"{where}: the encoder's {unused[0]} gets no gradient, as every parameter that is "
            "trained must"
        )
        raise InputError(Code.MODEL_INVALID, f"{text}; remove it, or set requires_grad = False")


def synchronised(ranks: Ranks, encoder: nn.Module) -> nn.Module:
    """Returns the same encoder, with batch normalisation over the rows of all ranks; its state
    keeps its names.
    """
    found: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(encoder, ranks.tensors)  # type: ignore[no-untyped-call]
    return found


def _unused(encoder: nn.Module, spec: InputSpec, device: torch.device, where: str) -> list[str]:
    """Returns names of parameters without a gradient. Raises InputError if none is trained, or no
    rows fail.
    """
    trained = {name: each for name, each in encoder.named_parameters() if each.requires_grad}
    if not trained:
        raise InputError(
            Code.MODEL_INVALID, f"{where}: the encoder has nothing to train; start one process"
        )
    mode = encoder.training
    # So that statistics stay as they are.
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
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        text = (
            f"{where}: the encoder fails on a batch of no rows, which a short last batch may "
            f"give a rank ({what})"
        )
        raise InputError(Code.MODEL_INVALID, f"{text}; start one process") from error
    finally:
        encoder.train(mode)
    return [name for name, each in zip(trained, gradients, strict=True) if each is None]


def _seed(device: torch.device) -> int:
    """Returns a seed for the others' dropout: of this process's generators, which checkpoints keep,
    without a draw.
    """
    digest = hashlib.sha256(torch.get_rng_state().numpy().data)
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
