"""`vfl-party account`: what all runs together have told each peer about the same people, summed
from the party's record; and the limits on it.
"""
