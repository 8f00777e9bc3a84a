"""``vfl prepare``: from the official files of a paper's data set to the parties' tables and a recipe
that runs.
"""
