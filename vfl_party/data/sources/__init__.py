"""Reads tables from files, folders, databases, named data sets and memory."""
