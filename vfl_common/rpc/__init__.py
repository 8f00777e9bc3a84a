"""The transport: channels, streams, rendezvous. The only package that imports grpc.

gRPC's core reads these settings when it is imported; values that the environment has already take
precedence.
"""

import os

# gRPC's core logs every failed handshake to standard error; ``identity.diagnose`` reports what a
# person needs.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The older poller hands a message from the socket to Python through one thread fewer: a few per
# cent more steps a second (docs/explanation/decisions/0001).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

# Each channel's thread then waits for its own sockets only. With epoll one thread waits for all
# sockets, often the wrong one: the idle channel's thread takes a message off the wire and has to
# wake the thread that wants it.
os.environ.setdefault("GRPC_POLL_STRATEGY", "poll")
