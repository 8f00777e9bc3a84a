"""The computations of private set intersection, without a network. Its worker processes do not
import torch, grpc or numpy.
"""
