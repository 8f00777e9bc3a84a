"""The transport: channels, streams, rendezvous. The only package that imports grpc.

Both settings are read by gRPC's core when it is imported; the environment's own take precedence.
"""

import os

# gRPC's core logs every failed handshake to standard error; what a person needs is said by ``identity.diagnose``.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The older poller hands a message from the socket to Python through one thread fewer: a few per cent more
# steps a second (docs/decisions/0001).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
