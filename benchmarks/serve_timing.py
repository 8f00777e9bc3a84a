"""Whether the time of an answer tells if a party knows an id: ``python -m benchmarks.serve_timing
[--requests 2000]``.

Three parties serve on this machine. A caller without a token, one with another model's and one with
this model's ask for an id that all parties know and for one that nobody knows, by turns. Of each
caller: medians, and how often an answer about a known id takes longer than one about an unknown id
(0.5 tells nothing).
"""

from __future__ import annotations

import http.client
import random
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import click
import numpy as np
from sklearn.metrics import roc_auc_score

from tests.harness.served import ROWS, trained
from vfl_serve.tokens import add_token


def seconds(line: http.client.HTTPConnection, token: str, name: str) -> tuple[float, int]:
    """Returns how long an answer takes, and its status."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    body = f'{{"ids": ["{name}"]}}'.encode()
    began_s = time.perf_counter()
    line.request("POST", "/v1/predict", body, headers)
    answer = line.getresponse()
    answer.read()
    return time.perf_counter() - began_s, answer.status


def measured(host: str, token: str, requests: int) -> tuple[dict[bool, list[float]], int]:
    """Returns {whether the id is known: seconds}, and the status of the answers."""
    took: dict[bool, list[float]] = {True: [], False: []}
    draw, status = random.Random(1), 0  # noqa: S311 - a benchmark's choice of ids
    line = http.client.HTTPConnection(host, timeout=30)
    for at in range(2 * requests + 100):
        known = bool(at % 2)
        name = f"K-{draw.randrange(ROWS)}" if known else f"X-{draw.randrange(ROWS)}"
        each_s, status = seconds(line, token, name)
        # The first ones warm up.
        if at >= 100:
            took[known].append(each_s)
    line.close()
    return took, status


@click.command()
@click.option("--requests", default=2000, help="Of each kind.")
def main(requests: int) -> None:
    with tempfile.TemporaryDirectory() as folder, trained(Path(folder)) as served:
        tokens = Path(folder) / "tokens.json"
        other = add_token(tokens, "other", models=("another",))
        ours = add_token(tokens, "ours")
        served.start_all(tokens=str(tokens))
        host = urlsplit(served.url).netloc
        callers = {"without a token": "none", "another model's token": other, "a token": ours}
        for caller, token in callers.items():
            took, status = measured(host, token, requests)
            known, unknown = (1e3 * float(np.median(took[each])) for each in (True, False))
            truth = [True] * requests + [False] * requests
            longer = roc_auc_score(truth, took[True] + took[False])
            click.echo(
                f"{caller:22} {status}  known {known:.3f} ms, unknown {unknown:.3f} ms, "
                f"longer in {longer:.3f} of pairs"
            )


if __name__ == "__main__":
    main()
