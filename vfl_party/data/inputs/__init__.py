"""Turns a table into encoder inputs and training targets, and back."""
