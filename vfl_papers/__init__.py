"""Makes parties' tables and a recipe from the official files of a data set. See README.md."""
