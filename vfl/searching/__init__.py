"""Searches the settings of a recipe by the metrics of its validation rows, with Optuna."""
