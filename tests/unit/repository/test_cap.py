"""CAP of FedHSSL's Table VII: the paper's own Table XI gives its own Table VII."""

from __future__ import annotations

import pytest

from benchmarks.leaks_fedhssl import PAPER, Attacked, cap

# FedHSSL: main, recovered.
NUSWIDE = {1.0: (0.538, 0.471), 5.0: (0.519, 0.449), 25.0: (0.503, 0.443)}
BHI_LOCAL = {1.0: (0.756, 0.710), 5.0: (0.732, 0.699), 25.0: (0.710, 0.685)}


def runs(found: dict[float, tuple[float, float]], seed: int = 1) -> list[Attacked]:
    return [
        Attacked(seed, "FedHSSL", PAPER, lambda_f, main, {"frozen": recovered}, {})
        for lambda_f, (main, recovered) in found.items()
    ]


@pytest.mark.parametrize(("found", "published"), [(NUSWIDE, 0.284), (BHI_LOCAL, 0.221)])
def test_cap_is_the_mean_over_lambda_of_main_times_what_was_not_recovered(
    found: dict[float, tuple[float, float]], published: float
) -> None:
    spread = cap(runs(found), "frozen")
    assert spread is not None
    assert spread.mean == pytest.approx(published, abs=0.0006)


def test_a_seed_that_lacks_a_lambda_does_not_count() -> None:
    part = runs({1.0: (0.9, 0.1), 0.0: (1.0, 0.0)}, seed=2)
    spread = cap([*runs(NUSWIDE), *part], "frozen")
    assert spread is not None
    assert len(spread.values) == 1
    assert cap(part, "frozen") is None
