"""What private set intersection computes, without a network. Its workers stay small: no torch, no
grpc, no numpy.
"""
