"""Writes float32 numbers in fewer bytes: packed bits, the largest numbers of a row, 16-bit floats.
It uses only numpy, and keeps no state.
"""
