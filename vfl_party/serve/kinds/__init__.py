"""Scorers of the active party and answers of passive parties for each kind of model. Models of
encoders and a top model are in ``vfl_party.serve.scorer`` and ``vfl_party.serve.answering``.
"""
