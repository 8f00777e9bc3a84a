"""Recipes and party files: TOML, read into frozen models, unknown keys refused with the nearest known one."""
