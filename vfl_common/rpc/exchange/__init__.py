"""The exchange of bundles: the hub, its two kinds of pipes (gRPC and memory), and the links to
it.
"""
