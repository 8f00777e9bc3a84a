"""``vfl prepare``: makes parties' tables and a recipe from the official files of a data set."""
