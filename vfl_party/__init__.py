"""A party of a federation, active or passive: its data, its methods, its program."""

import os

# Otherwise Intel's MKL computes a row by where it lies in memory, and its last bit follows from the
# rows beside it: a served row would not be the row of a prediction. It reads this at its first
# product of matrices; a value that the environment has already takes precedence.
os.environ.setdefault("MKL_CBWR", "AUTO")
