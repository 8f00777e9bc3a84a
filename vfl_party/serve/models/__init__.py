"""Several runs served side by side: which of them answers, how another takes its place, and how two
are compared.
"""
