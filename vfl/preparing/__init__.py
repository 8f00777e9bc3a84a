"""``vfl prepare``: from the official files of a data set to the parties' tables and a recipe."""
