"""Manages trained models: stages, comparison of models, drift, and removal of old runs."""
