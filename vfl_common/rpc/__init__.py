"""The transport over gRPC: channels, streams and the rendezvous of the parties. Only this package
imports grpc.

gRPC's core reads the settings below when it is imported. Values that the environment sets already
take precedence.
"""

import os

# gRPC's core would log every failed handshake to standard error. ``identity.diagnose`` reports
# failures instead.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# The older poller passes a message from the socket to Python through one thread fewer, which gives
# a few per cent more steps per second (docs/contributing/decisions/0001).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

# With poll, each channel's thread waits only for its own sockets. With epoll, one thread waits for
# all sockets: often the thread of an idle channel reads a message and must then wake the thread
# that needs it.
os.environ.setdefault("GRPC_POLL_STRATEGY", "poll")
