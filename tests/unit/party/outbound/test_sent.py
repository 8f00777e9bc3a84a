"""Nobody gets other tensors under the noise of tensors that they have already."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from tests.harness.errors import assert_names
from vfl_common.bundle import StepKey
from vfl_party.outbound import chain as sent
from vfl_party.outbound.chain import Chain, SentDigests
from vfl_party.outbound.declared import PartialFilter
from vfl_party.outbound.filter import Filter, Passage
from vfl_party.outbound.transforms import (
    ClippedGaussian,
    ClippedGaussianSettings,
    GaussianNoise,
    IsoNoise,
    MaxNorm,
)

AT = Passage(StepKey("splitnn", 3, 1), "bank", "shop")
G_BD = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
NOISY: dict[str, Callable[[], Filter]] = {
    "gaussian": lambda: GaussianNoise(1.0),
    "iso": lambda: IsoNoise(1.0),
    "max norm": MaxNorm,
    "clipped": lambda: ClippedGaussian(
        ClippedGaussianSettings(clip=100.0, epsilon=1.0, delta=1e-5)
    ),
    "leaving": lambda: PartialFilter(GaussianNoise(1.0), frozenset({"other"})),
}


def noise(chain: Chain, g_BD: torch.Tensor, at: Passage = AT) -> torch.Tensor:
    return chain.apply({"dz": g_BD}, at)["dz"] - g_BD


@pytest.mark.parametrize("kind", NOISY)
def test_the_same_tensors_get_the_same_noise_and_others_get_other(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, way = SentDigests(), "splitnn: embedding, down"
    first = Chain([NOISY[kind]()], sent=before, way=way)
    state = first.state()

    def resumed() -> Chain:
        """The chain of the next generation, as a checkpoint restores it."""
        chain = Chain([NOISY[kind]()], sent=before, way=way)
        chain.load_state(state)
        return chain

    found = noise(first, G_BD)
    assert torch.equal(noise(resumed(), G_BD), found)
    assert not caplog.records
    other_BD = G_BD.clone()
    other_BD[0] += 1e-3
    with caplog.at_level(logging.WARNING):
        other = noise(resumed(), other_BD)
    # Without it the difference of both messages has next to no noise.
    assert (other - found).abs().max() > 0.1
    assert_names(caplog.text, "vfl_party.outbound.chain", "shop")
    # A third time: neither of them comes under noise that the other has had.
    for repeated in (other_BD, G_BD):
        third = noise(resumed(), repeated)
        assert min((third - each).abs().max() for each in (found, other)) > 0.1


def test_another_step_receiver_or_exchange_is_no_message_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = SentDigests()
    for way in ("up", "down"):
        for at in (AT, AT._replace(receiver="clinic"), AT._replace(step=StepKey("splitnn", 3, 2))):
            Chain([GaussianNoise(1.0)], sent=before, way=way).apply({"dz": torch.randn(2, 2)}, at)
    assert not caplog.records


def test_the_oldest_messages_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "_MAX_MESSAGES", 2)
    before = SentDigests()
    places = [AT._replace(step=StepKey("splitnn", 0, batch)) for batch in range(3)]
    assert not any(before.differs("down", at, {"dz": G_BD}) for at in places)
    assert before.differs("down", places[2], {"dz": -G_BD})
    # Too long ago.
    assert not before.differs("down", places[0], {"dz": -G_BD})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_what_leaves_may_have_any_type(dtype: torch.dtype) -> None:
    before, x = SentDigests(), torch.arange(6).reshape(2, 3).to(dtype)
    assert not before.differs("up", AT, {"x": x})
    assert not before.differs("up", AT, {"x": x.clone()})
    assert before.differs("up", AT, {"x": x + 1})
    assert before.differs("up", AT, {"x": x})
    assert not before.differs("down", AT, {"x": x})
    assert before.differs("down", AT, {"x": x.reshape(3, 2)})
