"""Losses of self-supervision on embeddings, one in each file, and the moving average and the queue
for momentum encoders.
"""

from vfl_party.selfsup.losses.byol import byol
from vfl_party.selfsup.losses.ema import ema_update
from vfl_party.selfsup.losses.moco import moco
from vfl_party.selfsup.losses.nt_xent import nt_xent
from vfl_party.selfsup.losses.queue import KeyQueue
from vfl_party.selfsup.losses.simsiam import simsiam
from vfl_party.selfsup.losses.variance import variance_kept

__all__ = ["KeyQueue", "byol", "ema_update", "moco", "nt_xent", "simsiam", "variance_kept"]
