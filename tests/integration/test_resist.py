"""TAResSFL's resistance: its penalty and gradient, and a decoder that resumes bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.harness.present import present
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.methods.mocosfl.resist import Resistance, ResistSettings, penalty, ssim
from vfl_party.models import seed_torch
from vfl_party.models.halves import Decoder

LATENT, IMAGE = (3, 4, 4), (1, 8, 8)
CPU = torch.device("cpu")


def resistance(*, by_ssim: bool = False, **settings: Any) -> Resistance:
    return Resistance(
        ResistSettings(**settings), LATENT, IMAGE, seed=3, device=CPU, by_ssim=by_ssim
    )


def batch(seed: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *LATENT, generator=random), torch.rand(rows, *IMAGE, generator=random)


def decoder_of(resist: Resistance) -> Decoder:
    """The decoder as it is now, in evaluation mode."""
    decoder = Decoder(LATENT, IMAGE)
    decoder.load_state_dict(resist.state()["decoder"])
    return decoder.eval()


def test_the_defaults_are_the_papers() -> None:
    assert ResistSettings() == ResistSettings(weight=2.0, ssim=0.6, lr=1e-3)
    with pytest.raises(ValidationError):
        ResistSettings(ssim=1.0)


def test_the_penaltys_gradient_is_that_of_small_differences() -> None:
    with seed_torch(1):
        decoder = Decoder((2, 2, 2), (1, 4, 4)).double().eval()
        z, images = (
            torch.randn(2, 2, 2, 2, dtype=torch.float64),
            torch.rand(2, 1, 4, 4, dtype=torch.float64),
        )

    def of(z: Tensor) -> Tensor:
        found, similarity = penalty(decoder, z, images, 2.0, -1.0)
        assert found is not None
        assert found.item() == pytest.approx(2.0 * (similarity + 1.0))
        return found

    assert torch.autograd.gradcheck(of, z.requires_grad_())


@pytest.mark.parametrize("by_ssim", [False, True])
def test_the_gradient_is_the_penaltys_after_the_decoders_step(by_ssim: bool) -> None:
    resist, (z, images) = resistance(by_ssim=by_ssim, ssim=0.0, weight=5.0), batch(1)
    dz, similarity = None, 0.0
    # Until the decoder has learnt enough for an SSIM above 0.
    for _ in range(40):
        dz, similarity = resist.gradient(z, images)
    assert dz is not None
    leaf = z.clone().requires_grad_()
    found = ssim(decoder_of(resist)(leaf), images)
    assert similarity == pytest.approx(found.item(), abs=1e-6)
    assert similarity > 0.0
    (expected,) = torch.autograd.grad(5.0 * found, leaf)
    torch.testing.assert_close(dz, expected)
    assert dz.shape == z.shape
    assert dz.abs().sum() > 0


def test_no_penalty_at_the_threshold_or_below() -> None:
    resist, (z, images) = resistance(ssim=0.999), batch(2)
    dz, similarity = resist.gradient(z, images)
    assert dz is None
    assert similarity < 0.999
    decoder = decoder_of(resist)
    _, value = penalty(decoder, z, images, 2.0, -1.0)
    assert penalty(decoder, z, images, 2.0, value) == (None, value)
    above, _ = penalty(decoder, z, images, 2.0, value - 0.25)
    assert present(above).item() == pytest.approx(0.5, abs=1e-5)


def test_a_bottom_that_follows_the_gradient_is_less_similar() -> None:
    resist, (z, images) = resistance(ssim=0.0, by_ssim=True), batch(3)
    for _ in range(40):
        dz, before = resist.gradient(z, images)
    assert dz is not None
    after = ssim(decoder_of(resist)(z - 3 * dz / dz.norm()), images)
    assert after.item() < before - 0.01


def test_the_decoder_learns_and_the_bottoms_graph_stays() -> None:
    weight = torch.ones(1, requires_grad=True)
    z, images = batch(4)
    latents = z * weight
    for by_ssim in (False, True):
        resist, found = resistance(by_ssim=by_ssim), []
        for _ in range(30):
            _, similarity = resist.gradient(latents, images)
            found.append(similarity)
        assert found[-1] > found[0] + 0.05
    assert weight.grad is None
    latents.sum().backward()
    assert weight.grad is not None


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    one, shown = resistance(ssim=0.0), batch(5)
    for _ in range(20):
        one.gradient(*shown)
    kept = unpack(*pack(one.state()))
    other = Resistance(ResistSettings(ssim=0.0), LATENT, IMAGE, seed=99, device=CPU, by_ssim=False)
    other.load_state(kept)
    for _ in range(3):
        (dz, similarity), (dz_other, similarity_other) = (
            one.gradient(*shown),
            other.gradient(*shown),
        )
        assert similarity == similarity_other
        assert torch.equal(present(dz), present(dz_other))
    for name, value in one.state()["decoder"].items():
        assert torch.equal(value, other.state()["decoder"][name]), name


def test_the_same_seed_makes_the_same_decoder_and_leaves_the_generator() -> None:
    before = torch.get_rng_state()
    one, other = resistance().state()["decoder"], resistance().state()["decoder"]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
