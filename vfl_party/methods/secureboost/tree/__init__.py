"""One tree: the possible splits of columns, the best split, and the rows of each node."""
