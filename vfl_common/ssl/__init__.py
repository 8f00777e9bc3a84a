"""Self-supervision on embeddings: one loss a file, and what methods with a momentum encoder keep between steps."""

from vfl_common.ssl.byol import byol
from vfl_common.ssl.ema import ema_update
from vfl_common.ssl.moco import moco
from vfl_common.ssl.nt_xent import nt_xent
from vfl_common.ssl.queue import KeyQueue
from vfl_common.ssl.simsiam import simsiam
from vfl_common.ssl.variance import variance_kept

__all__ = ["KeyQueue", "byol", "ema_update", "moco", "nt_xent", "simsiam", "variance_kept"]
