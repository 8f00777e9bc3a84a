"""Finds likely problems of a table, and describes them to its owner."""
