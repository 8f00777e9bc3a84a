"""Searches settings of a recipe with Optuna, by a metric on the validation rows."""
