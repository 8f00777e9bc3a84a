"""Data sets whose rows are numbers and categories."""
