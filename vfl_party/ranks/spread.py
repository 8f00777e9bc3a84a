"""Runs one encoder on all ranks. DistributedDataParallel sums gradients at rank 0, which has the
only optimizer, without dividing. The code is the same at rank 0 and at the other ranks.

Gradients are summed, not averaged over the ranks, because each row's gradient is already the
gradient of the whole batch's loss. A sum at rank 0 needs half the traffic of an all-reduce. The
other half is used by the weights, which are sent with the next batch.

Each parameter's gradient is a separate message. Gloo and NCCL cut a message into parts and sum each
part in another order of the ranks. So the last bits of a sum depend on the position of the number
in its message. A bucket's layout changes after the first step of a generation, and a resumed run
has such a first step in its middle. With one message for each bucket, a resumed run would end with
other parameters than an uninterrupted run.

This module does not postpone annotations, because torch compares the hook's annotations with its
own types.
"""

import re
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from vfl_party.models import InputSpec, forward
from vfl_party.models.training import Precision
from vfl_party.ranks.group import Ranks


class OnRanks:
    """This rank's part of an encoder on all ranks. All ranks must make it together.

    ``trains``: Whether its weights may get gradients, which are then summed at rank 0.
    """

    def __init__(
        self,
        ranks: Ranks,
        encoder: nn.Module,
        spec: InputSpec,
        precision: Precision,
        *,
        trains: bool,
    ) -> None:
        self.encoder = synchronize_norms(ranks, encoder)
        self._precision = precision
        self._alone = SequentialEncoder(self.encoder, 2 if spec.cardinalities else 1)
        self._parallel = make_parallel(self._alone, ranks.device, ranks.tensors) if trains else None

    def __call__(self, batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Embeds this rank's rows of K batches. Returns [K B, D]."""
        inputs = [x for batch in batches for x in batch]
        learns = torch.is_grad_enabled() and self._parallel is not None
        model = self._parallel if learns and self._parallel is not None else self._alone
        return forward(model, *inputs, precision=self._precision)


def synchronize_norms(ranks: Ranks, encoder: nn.Module) -> nn.Module:
    """Makes an encoder's batch normalisation use the rows of all ranks. The names in its state stay
    the same.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(encoder, ranks.tensors)  # type: ignore[no-untyped-call]
    return converted


def trains(encoder: nn.Module) -> bool:
    """Returns whether any of an encoder's weights may get a gradient."""
    return any(parameter.requires_grad for parameter in encoder.parameters())


def describe_structure(encoder: nn.Module) -> str:
    """Describes an encoder's layers and the shapes of its state. Two encoders have the same
    description if the weights of one fit the other.
    """
    layers = re.sub(r"(Sync)?BatchNorm(\dd)?", "BatchNorm", repr(encoder))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in encoder.state_dict().items()]
    return f"{layers}\n{shapes}"


def reduce_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sums a bucket of gradients at rank 0, while the backward pass computes the next bucket."""
    sums: list[Future[object]] = []
    # The gradients are views of the bucket's buffer.
    for gradient in bucket.gradients():
        work = dist.reduce(gradient, dst=0, group=group, async_op=True)
        assert work is not None  # noqa: S101 - as asynchronous
        sums.append(work.get_future())
    return sums[-1].then(partial(_wait_for_sums, bucket, sums))


def _wait_for_sums(bucket: dist.GradBucket, sums: list[Future[object]], _: object) -> torch.Tensor:  # type: ignore[name-defined]
    """Returns the bucket once all its gradients are summed. Raises the error of any sum that
    failed.
    """
    # The future of collect_all would not wait for a GPU's stream.
    for total in sums:
        total.wait()
    gradients: torch.Tensor = bucket.buffer()
    return gradients


class SequentialEncoder(nn.Module):
    """Wraps an encoder to embed several batches in one forward call, so that one backward pass
    covers all of them, such as the two views of a batch.

    ``arity``: The number of tensors that the encoder takes.
    """

    def __init__(self, encoder: nn.Module, arity: int) -> None:
        super().__init__()
        self.encoder, self.arity = encoder, arity

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Embeds K batches and returns [K B, D]. inputs: The arguments of each batch, [B, …]."""
        starts = range(0, len(inputs), self.arity)
        embeddings = [self.encoder(*inputs[start : start + self.arity]) for start in starts]
        return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings)


def make_parallel(
    module: nn.Module, device: torch.device, group: dist.ProcessGroup
) -> DistributedDataParallel:
    """Wraps ``module`` so that its backward pass sums its gradients at rank 0. All ranks must call
    this together.
    """
    gpus = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(module, device_ids=gpus, process_group=group)
    wrapped.register_comm_hook(group, reduce_bucket)
    return wrapped
