"""Serves a trained model: the active party asks the passive parties about ids, over streams that
the passive parties open.
"""
