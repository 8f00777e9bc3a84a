"""Reads tables from databases."""
