"""Deterministic initialisation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

from vfl_common.errors import InternalError
from vfl_party.base.seeds import SECRET

# The words of the state of Mersenne Twister; the byte of torch's state where they begin, 8 bytes
# each.
_WORDS, _FIRST = 624, 24


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Starts torch's CPU generator from ``seed`` inside the block and restores it afterwards, not
    CUDA's.

    Build modules inside the block and move them to a device afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the CUDA generators too.
        seed_generator(torch.default_generator, seed)
        yield


def generator(seed: int) -> torch.Generator:
    """Returns a generator on the CPU that starts from ``seed``."""
    random = torch.Generator()
    seed_generator(random, seed)
    return random


def seed_generator(of: torch.Generator, seed: int) -> None:
    """Starts a generator of the CPU from a seed of ``derive_seed``.

    torch takes 32 bits of a seed, few enough to try them all. So a secret seed fills the
    generator's whole state.
    """
    if seed < SECRET:
        of.manual_seed(seed)
        return
    _check_layout()
    _fill(of, _words(seed))


def _words(seed: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(seed.to_bytes(16, "little")).digest(4 * _WORDS), "<u4")


def _fill(of: torch.Generator, words: np.ndarray) -> None:
    # Seeding drops a cached half of a normal pair, so that the next number comes from these words.
    of.manual_seed(0)
    state = of.get_state().numpy().copy()
    state[_FIRST : _FIRST + 8 * _WORDS].view("<u8")[:] = words
    of.set_state(torch.from_numpy(state))


@cache
def _check_layout() -> None:
    """Raises InternalError if this version of torch does not draw from the words as numpy's
    Mersenne Twister does.
    """
    ours, theirs, words = torch.Generator(), np.random.MT19937(), _words(SECRET)
    _fill(ours, words)
    theirs.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
    drawn = torch.empty(2 * _WORDS, dtype=torch.int32).random_(generator=ours)
    if not np.array_equal(drawn.numpy(), theirs.random_raw(2 * _WORDS) & 0x7FFFFFFF):
        raise InternalError(
            'init = "secret" does not support the generator state of this version of torch; '
            'install the torch of pyproject.toml, or set init = "recipe"'
        )
