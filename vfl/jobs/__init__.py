"""Carries out orders in other processes, which this package or a joblib backend starts.

An order and its answer are dicts of JSON values. A process imports the function that carries out an
order by its name, ``module:function``. So no Python objects are pickled.
"""
