"""How DistributedDataParallel adds gradients up: at rank 0, which has the only optimizer, and without dividing.

Not an average over the ranks, since each row's gradient is already that of the batch's loss, however the rows are
shared out. Half the traffic of its all-reduce; the other half is the weights, which go out with the next batch.

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
    work = dist.reduce(bucket.buffer(), dst=0, group=group, async_op=True)
    assert work is not None  # noqa: S101 - as asynchronous
    return work.get_future().then(partial(_buffer, bucket))


def _buffer(bucket: dist.GradBucket, _future: object) -> torch.Tensor:  # type: ignore[name-defined]
    gradients: torch.Tensor = bucket.buffer()
    return gradients


def parallel(module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> DistributedDataParallel:
    """``module``, whose backward pass adds its gradients up at rank 0; to be called by all ranks together."""
    gpus = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(module, device_ids=gpus, process_group=group)
    wrapped.register_comm_hook(group, add_up)
    return wrapped
