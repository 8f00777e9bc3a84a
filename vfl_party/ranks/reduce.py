"""How DistributedDataParallel adds gradients up: at rank 0, which has the only optimizer, and without dividing.

Not an average over the ranks, since each row's gradient is already that of the batch's loss, however the rows are
shared out. Half the traffic of its all-reduce; the other half is the weights, which go out with the next batch.

Each parameter's gradient is a message of its own. Gloo and NCCL cut a message into parts and add up each part in
another order of the ranks, so that the last bits of a sum depend on where in its message a number is. A bucket's layout
changes after the first step of a generation, and a run that resumes from a checkpoint has such a first step in its
middle: with a message for each bucket, it would end with other parameters than the undisturbed run.

No postponed annotations here: torch compares those of the hook with its own types.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def add_up(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """A bucket of gradients to rank 0, while the backward pass computes the next."""
    sums: list[Future[object]] = []
    for gradient in bucket.gradients():  # views of the bucket's buffer
        work = dist.reduce(gradient, dst=0, group=group, async_op=True)
        assert work is not None  # noqa: S101 - as asynchronous
        sums.append(work.get_future())
    return sums[-1].then(partial(_buffer, bucket, sums))


def _buffer(bucket: dist.GradBucket, sums: list[Future[object]], _: object) -> torch.Tensor:  # type: ignore[name-defined]
    """The bucket once all its gradients are summed. Raises what any of the sums has failed with."""
    for each in sums:  # not collect_all: what it returns does not wait for a GPU's stream
        each.wait()
    gradients: torch.Tensor = bucket.buffer()
    return gradients


def parallel(module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> DistributedDataParallel:
    """``module``, whose backward pass adds its gradients up at rank 0; to be called by all ranks together."""
    gpus = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(module, device_ids=gpus, process_group=group)
    wrapped.register_comm_hook(group, add_up)
    return wrapped
