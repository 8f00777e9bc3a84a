"""Data sets whose rows are images."""
