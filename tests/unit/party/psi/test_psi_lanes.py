"""Eight points at a time: the same points, no library that does not work, and none for points of
others.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.errors import raises
from vfl_party.psi import lanes, worker
from vfl_party.psi.curve import POINT_BYTES, hash_ids, mask
from vfl_party.psi.lanes import hash_and_mask

RFC_7748 = (
    "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
    "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
    "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
)


@pytest.fixture
def eight() -> lanes.Lanes:
    found = lanes.load_lanes()
    if found is None:
        pytest.skip("ipp-crypto is not installed, or this processor has no AVX-512 IFMA")
    return found


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_own_ids_have_the_same_points_with_the_library_and_without(
    eight: lanes.Lanes, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, secret = [b"%d" % number for number in range(count)], os.urandom(32)
    found = hash_and_mask(ids, b"salt", secret)
    assert (
        found
        == eight.multiply(hash_ids(ids, b"salt"), secret)
        == mask(hash_ids(ids, b"salt"), secret)
    )
    monkeypatch.setattr(lanes, "load_lanes", lambda: None)
    assert hash_and_mask(ids, b"salt", secret) == found


def test_what_a_peer_sends_never_goes_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives wrong products of a few numbers, which a peer could choose."""

    def asked() -> lanes.Lanes:
        raise AssertionError("the library is asked for")

    theirs, salt, secret = hash_ids([b"1", b"2"], b"salt"), b"salt", os.urandom(32)
    monkeypatch.setattr(lanes, "load_lanes", asked)
    assert worker._answer([worker.OTHERS, b"shop", theirs], secret, salt) == [
        worker.DONE,
        mask(theirs, secret),
    ]
    with raises(AssertionError):
        worker._answer([worker.OWN, b"1"], secret, salt)


def test_eight_at_a_time_multiplies_as_in_rfc_7748(eight: lanes.Lanes) -> None:
    secret, u, product = map(bytes.fromhex, RFC_7748)
    # It does not count.
    top_bit = u[:-1] + bytes([u[-1] | 128])
    assert eight.multiply(u + top_bit, secret) == product * 2


@pytest.mark.parametrize("u", [0, 1])
def test_a_point_of_small_order_is_an_error_in_each_place(eight: lanes.Lanes, u: int) -> None:
    point, good = u.to_bytes(POINT_BYTES, "little"), hash_ids([b"a"], b"salt")
    for place in range(lanes.LANES + 1):
        points = good * place + point + good * (lanes.LANES - place)
        with raises(ValueError, names="crypto_mb"):
            eight.multiply(points, os.urandom(32))


def unfit(answer: int = 1, status: int = 0) -> Any:
    """A library that never writes a product."""

    class Function:
        def __init__(self, returned: int) -> None:
            self.returned = returned

        def __call__(self, *_: object) -> int:
            return self.returned

    return SimpleNamespace(
        mbx_is_crypto_mb_applicable=Function(answer), mbx_x25519_mb8=Function(status)
    )


@pytest.mark.parametrize("library", [unfit(answer=0), unfit(), unfit(status=0x11111111)])
def test_a_library_that_does_not_work_here_is_not_used(library: Any) -> None:
    with raises(OSError, names="crypto_mb"):
        lanes.Lanes(library)


def test_a_library_without_the_functions_is_not_used() -> None:
    with pytest.raises(AttributeError):
        lanes.Lanes(SimpleNamespace())  # type: ignore[arg-type]


class Listed:
    """A file in a package's list, ``size`` bytes long as the list says."""

    def __init__(self, path: Path, size: int | None) -> None:
        self.name, self.size, self.path = path.name, size, path

    def locate(self) -> Path:
        return self.path


def listed(case: str, folder: Path) -> Any:
    """What a package's list of files gives, or raises."""
    path = folder / "libintlc.so.5"
    path.write_bytes(b"no library")
    if case == "not installed":
        raise importlib.metadata.PackageNotFoundError
    if case == "a list that cannot be read":
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "no text")
    return {
        "no list": None,
        "an empty list": [],
        "a file of another size": [Listed(path, 1_000)],
        "a size that is not known": [Listed(path, None)],
        "no library": [Listed(path, 10)],
        "no file": [Listed(folder / "gone" / "libintlc.so.5", 10)],
    }[case]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("not installed", "intel-cmplr-lib-rt is not installed"),
        ("a list that cannot be read", "no text"),
        ("no list", "intel-cmplr-lib-rt lists no file libintlc.so.5. Install it again."),
        ("an empty list", "lists no file libintlc.so.5"),
        (
            "a file of another size",
            "does not have the size that intel-cmplr-lib-rt lists. Install it again.",
        ),
        ("a size that is not known", "does not have the size"),
        ("no library", "libintlc.so.5"),
        ("no file", "libintlc.so.5"),
    ],
)
def test_a_package_that_is_not_whole_is_not_used(
    case: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda _: listed(case, tmp_path))
    lanes.load_lanes.cache_clear()
    try:
        assert lanes.load_lanes() is None
    finally:
        lanes.load_lanes.cache_clear()
    lanes.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("one point after the other, by OpenSSL: ")
    assert said in line


@pytest.mark.parametrize(
    ("points", "secret"), [(31, 32), (33, 32), (1, 32), (32, 31), (32, 33), (0, 0)]
)
def test_other_lengths_are_refused(eight: lanes.Lanes, points: int, secret: int) -> None:
    with raises(ValueError, names="32"):
        eight.multiply(bytes(points), bytes(secret))


def test_the_module_says_what_this_machine_uses() -> None:
    said = subprocess.run(
        [sys.executable, "-m", lanes.__name__], capture_output=True, text=True, check=True
    ).stdout
    begins = (
        "eight points at a time" if lanes.load_lanes() is not None else "one point after the other"
    )
    assert said.startswith(begins)
    assert said.count("\n") == 1
