"""The transport: channels, streams, rendezvous. The only package that imports grpc.

gRPC's core reads both settings when it is imported; values that the environment has already take precedence.
"""

import os

# gRPC's core logs every failed handshake to standard error; ``identity.diagnose`` reports what a person needs.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The older poller hands a message from the socket to Python through one thread fewer: a few per cent more
# steps a second (docs/decisions/0001).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
