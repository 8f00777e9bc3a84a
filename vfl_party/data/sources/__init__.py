"""Readers: files, folders, databases, named sets and tables in memory."""
