"""Requests by id from the active party of a served model to the passive parties, over streams that
these open.
"""
