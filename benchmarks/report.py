"""How large a page of `vfl report` is, and how long it takes: with 27,000 kept predictions and four
baselines, of each kind of task.

    python -m benchmarks.report [--predictions 27000]

Fails if a page is larger than 1.5 MB, or takes more than 5 s of CPU: a busy machine takes longer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.harness import pages
from vfl.summary.reading import find
from vfl_lab.commands import write_run_page

MOST_BYTES, MOST_S = 1_500_000, 5.0
BASELINES = (
    ("bank", "splitnn"),
    ("bank", "gbdt"),
    ("combined", "splitnn"),
    ("combined", "gbdt"),
)


def main() -> None:
    """Prints a line for each kind of task."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--predictions", type=int, default=27_000)
    rows = options.parse_args().predictions
    slow = []
    for kind in pages.KINDS:
        with tempfile.TemporaryDirectory() as place:
            run = pages.finished_run(Path(place) / "20260101-120000-churn-0000", kind, rows=rows)
            for at, (name, phase) in enumerate(BASELINES, 1):
                phases = [{"kind": phase, "name": phase}]
                pages.finished_run(
                    Path(place) / f"20260101-12000{at}-churn-000{at}",
                    kind,
                    rows=rows,
                    parties=(name,),
                    recipe=pages.recipe_of(kind, (name,), phases=phases),
                    seed=0,
                )
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            page = write_run_page(find(run))
            took_s = time.perf_counter() - begin_s
            cpu_s = time.process_time() - cpu_s
            size = page.stat().st_size
        print(
            f"{kind:11} {rows:,} predictions: {size / 1e6:.2f} MB, {took_s:.1f} s ({cpu_s:.1f} s of CPU)"
        )
        slow += [kind] if size > MOST_BYTES or cpu_s > MOST_S else []
    if slow:
        raise SystemExit(f"larger or slower than promised: {', '.join(slow)}")


if __name__ == "__main__":
    main()
