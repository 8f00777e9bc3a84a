"""Reads sheets of Excel workbooks."""
