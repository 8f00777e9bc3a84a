"""Uses what a run has trained: joint prediction, tables of scores, one party's models by
themselves.
"""
