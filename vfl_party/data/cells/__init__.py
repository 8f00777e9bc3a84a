"""Reads single cells: numbers, dates and codes as people write them."""
