"""The plug-in that gives noise a known key: only programs may import it, never the tests' own
process.
"""

from types import SimpleNamespace

from tests.harness.reference_defences import KEY, secret
from vfl_party.models import layers
from vfl_party.outbound import filter as outbound_filter

# The entry point's object; only the import counts.
METHOD = None
vars(outbound_filter)["secrets"] = SimpleNamespace(randbits=lambda _bits: KEY)
vars(layers)["secrets"] = SimpleNamespace(token_bytes=secret)
