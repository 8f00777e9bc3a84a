"""Scorers of the active party and answers of passive parties for each kind of model. Models of
encoders and a top model are in ``vfl_serve.scorer`` and ``vfl_serve.answering``.
"""
