"""The transport: channels, streams, rendezvous. The only package that imports grpc."""

import os

# gRPC's core logs every failed handshake to standard error; what a person needs is said by ``identity.diagnose``.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
