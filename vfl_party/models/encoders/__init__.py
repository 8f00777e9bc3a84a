"""Encoders: one file for each kind, those of plug-ins, and the one that builds the recipe's."""
