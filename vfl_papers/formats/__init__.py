"""Readers of official formats, which do not trust what the files say about themselves."""
