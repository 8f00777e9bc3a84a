"""Reads the folders of runs, and shows them as tables and charts."""
