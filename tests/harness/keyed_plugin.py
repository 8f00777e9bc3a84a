"""The plug-in that gives noise a known key: only programs may import it, never the tests' own process."""

from types import SimpleNamespace

from tests.harness.reference_defences import KEY
from vfl_party import noise

METHOD = None  # the entry point's object; only the import counts
vars(noise)["secrets"] = SimpleNamespace(randbits=lambda _bits: KEY)
