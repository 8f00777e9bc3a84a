"""Models in use: which run is in production, whether a new one is better, whether its inputs have
changed, what may be removed.
"""
