"""Makes DistributedDataParallel sum gradients at rank 0, which has the only optimizer, without
dividing.

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

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


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
