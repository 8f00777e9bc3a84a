"""A served model whose passive parties add noise: who asks again gets the same, also after a
restart, so that nobody can average it away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tests.harness.served import NAMES, Served, trained

_SIGMA = 0.5


def clean(served: Served) -> dict[str, float]:
    """Returns the scores without noise, by id."""
    frames = [pd.read_csv(served.federation.data[name]["source"]) for name in NAMES]
    parts = [frame.drop(columns=["id", "label"], errors="ignore") for frame in frames]
    z = [served.run.model(name).embed(of) for name, of in zip(NAMES, parts, strict=True)]
    top = served.run.model("p0").top
    assert top is not None
    with torch.no_grad():
        scores_N = top(torch.cat(z, dim=1)).double().sigmoid().float().flatten().tolist()
    return dict(zip(frames[0]["id"], scores_N, strict=True))


def asked(served: Served, *ids: str) -> dict[str, Any]:
    rows = served.rows(*ids)
    assert {row["state"] for row in rows} == {"scored"}
    return {row["id"]: row["score_1"] for row in rows}


def test_noise_is_drawn_once_for_an_id(tmp_path: Path) -> None:
    phases = (
        {"kind": "fedonce", "epochs": 1, "batch_size": 24},
        {"kind": "head", "epochs": 1, "batch_size": 24, "noise": _SIGMA},
    )
    with trained(tmp_path, *phases) as served:
        served.start_all()
        ids = list(clean(served))
        first = asked(served, *ids)
        # There is noise, and in each id another.
        offsets = {round(first[each] - value, 6) for each, value in clean(served).items()}
        assert len(offsets) > len(ids) // 2
        # One by one, in another order, and from a program that was restarted.
        assert asked(served, *ids[::-1]) == first
        for each in ids[::40]:
            assert asked(served, each) == {each: first[each]}
        served.program("p1").kill()
        served.start("p1").wait_for("attending")
        served.wait_for(NAMES[1:])
        assert asked(served, *ids) == first
