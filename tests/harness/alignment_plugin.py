"""The plug-in of the tests of private alignment: small batches, deaths within it, and a count of
what is masked.

An empty file ``lie`` in the federation's folder makes the server mark one row fewer, or one more,
at each party. As with ``crash_plugin``, only programs may import it.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.harness import crash
from vfl_common import psi
from vfl_common.bundle import StepKey
from vfl_common.process.workers import Workers
from vfl_party.align import batches
from vfl_server import intersection

# The entry point's object; only the import counts.
METHOD = None
batches.BATCH = 20
# Four batches of tags, eight parts.
psi.TAG_BATCH, intersection._PART_TAGS = 200, 256
crash.STEPS |= {
    "ring": StepKey("align", 2, 8),
    "tags": StepKey("align", 3, 3),
    "lists": StepKey("align", 3, 5),
}


def _lying(masks: npt.NDArray[np.bool_]) -> None:
    if Path("lie").exists():
        masks[0, 0] = not masks[0, 0]


def _counted(*_: object) -> None:
    with Path(f"masked-{crash.name()}").open("ab") as file:
        file.write(b".")


crash.wrap_all()
crash.wrap(Workers, "_ask", before=_counted)
crash.wrap(intersection, "_pack_masks", before=_lying)
