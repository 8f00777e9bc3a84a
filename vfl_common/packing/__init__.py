"""Encodes float32 tensors in fewer bytes: quantized to few bits, sparse (top-k), or as 16-bit
floats. The package uses only numpy and keeps no state.
"""
