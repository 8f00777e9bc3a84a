"""Reads recipes and party files (TOML) into frozen models; unknown keys are refused with a
suggestion of the most similar key.
"""
