"""Seeds torch's generators, so that models get the same initial weights in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

from vfl_common.errors import InternalError
from vfl_party.base.seeds import SECRET

# The number of 32-bit words in a Mersenne Twister's state, and the offset in bytes of the first
# word in torch's state, where each word takes 8 bytes.
_WORDS, _FIRST = 624, 24


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator inside the ``with`` block and restores its state afterwards.

    CUDA's generators stay as they are. Build modules inside the block and move them to a device
    afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the CUDA generators too.
        seed_generator(torch.default_generator, seed)
        yield


def generator(seed: int) -> torch.Generator:
    """Returns a new CPU generator that is seeded with ``seed``."""
    random = torch.Generator()
    seed_generator(random, seed)
    return random


def seed_generator(random: torch.Generator, seed: int) -> None:
    """Seeds a CPU generator with a seed of ``derive_seed``.

    torch uses only 32 bits of a seed, so an attacker could try all seeds. A secret seed therefore
    fills the generator's whole state.
    """
    if seed < SECRET:
        random.manual_seed(seed)
        return
    _check_layout()
    _fill_state(random, _hash_seed(seed))


def _hash_seed(seed: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(seed.to_bytes(16, "little")).digest(4 * _WORDS), "<u4")


def _fill_state(random: torch.Generator, words: np.ndarray) -> None:
    # torch draws normal numbers in pairs and caches the second. Seeding clears this cache.
    random.manual_seed(0)
    state = random.get_state().numpy().copy()
    state[_FIRST : _FIRST + 8 * _WORDS].view("<u8")[:] = words
    random.set_state(torch.from_numpy(state))


@cache
def _check_layout() -> None:
    """Raises InternalError if torch's generator state has another layout than expected.

    The check compares torch's numbers with numpy's Mersenne Twister in the same state.
    """
    torch_generator, numpy_generator, words = (
        torch.Generator(),
        np.random.MT19937(),
        _hash_seed(SECRET),
    )
    _fill_state(torch_generator, words)
    numpy_generator.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
    numbers = torch.empty(2 * _WORDS, dtype=torch.int32).random_(generator=torch_generator)
    if not np.array_equal(numbers.numpy(), numpy_generator.random_raw(2 * _WORDS) & 0x7FFFFFFF):
        raise InternalError(
            'init = "secret" does not support the generator state of this version of torch; '
            'install the torch of pyproject.toml, or set init = "recipe"'
        )
