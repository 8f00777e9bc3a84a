"""Converts a table to encoder inputs and training targets, and predictions back to labels."""
