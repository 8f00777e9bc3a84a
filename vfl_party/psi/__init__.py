"""The computations of private set intersection, without a network. Its modules do not import torch,
grpc or numpy, so that worker processes start fast.
"""
