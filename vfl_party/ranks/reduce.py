"""Makes DistributedDataParallel sum gradients at rank 0, which has the only optimizer, without
dividing.

They are summed, not averaged over the ranks, because each row's gradient is already that of the
batch's loss, however the rows are shared out. A sum at rank 0 is half the traffic of an all-reduce;
the other half is the weights, which are sent with the next batch.

Each parameter's gradient is its own message. Gloo and NCCL cut a message into parts and sum each
part in another order of the ranks. So the last bits of a sum depend on the number's place in its
message. A bucket's layout changes after the first step of a generation, and a resumed run has such
a first step in its middle. With one message for each bucket it would end with other parameters than
the undisturbed run.

No postponed annotations here: torch compares those of the hook with its own types.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def add_up(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sums a bucket of gradients at rank 0, while the backward pass computes the next."""
    sums: list[Future[object]] = []
    # Views of the bucket's buffer.
    for gradient in bucket.gradients():
        work = dist.reduce(gradient, dst=0, group=group, async_op=True)
        assert work is not None  # noqa: S101 - as asynchronous
        sums.append(work.get_future())
    return sums[-1].then(partial(_buffer, bucket, sums))


def _buffer(bucket: dist.GradBucket, sums: list[Future[object]], _: object) -> torch.Tensor:  # type: ignore[name-defined]
    """Returns the bucket once all its gradients are summed. Raises the error of any sum that
    failed.
    """
    # Not collect_all: its future does not wait for a GPU's stream.
    for total in sums:
        total.wait()
    gradients: torch.Tensor = bucket.buffer()
    return gradients


class SequentialEncoder(nn.Module):
    """An encoder that passes several batches one after the other, so that one backward pass takes
    them all: of the two views of a batch, say.

    ``arity``: how many tensors the encoder takes.
    """

    def __init__(self, encoder: nn.Module, arity: int) -> None:
        super().__init__()
        self.encoder, self.arity = encoder, arity

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """inputs: the arguments of each batch, [B, …]; returns the embeddings of all, [K B, D]."""
        starts = range(0, len(inputs), self.arity)
        embeddings = [self.encoder(*inputs[start : start + self.arity]) for start in starts]
        return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings)


def parallel(
    module: nn.Module, device: torch.device, group: dist.ProcessGroup
) -> DistributedDataParallel:
    """Wraps ``module`` so that its backward pass sums its gradients at rank 0; all ranks call this
    together.
    """
    gpus = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(module, device_ids=gpus, process_group=group)
    wrapped.register_comm_hook(group, add_up)
    return wrapped
