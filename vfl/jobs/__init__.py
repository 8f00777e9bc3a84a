"""Carries out orders in other processes: our own, or those of a backend of joblib.

An order is a dict of JSON values, and so is its answer. The function that carries it out is named
by ``module:function``, so none of our objects is pickled, on this machine or another.
"""
