"""Uses what a run has trained: joint prediction, tables of scores, one party's models by
themselves, drift of new rows, and what is kept about one person.
"""
