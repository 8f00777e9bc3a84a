"""Notes likely problems of a table, for its owner."""
