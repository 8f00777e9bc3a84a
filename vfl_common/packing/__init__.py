"""Writes float32 numbers in fewer bytes: packed bits, the largest numbers of a row, halves. numpy
only, no state.
"""
