"""Reads recipes and party files (TOML) into frozen models; refuses unknown keys and names the
nearest known one.
"""
