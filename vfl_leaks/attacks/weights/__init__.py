"""Attacks that read shared weights."""
