"""Carries out orders in other processes: our own, or those of a backend of joblib.

An order is a dict that JSON can hold, and so is its answer. A function carries an order out, and is
named by ``module:function``. So no object of ours is pickled, wherever the process is.
"""
