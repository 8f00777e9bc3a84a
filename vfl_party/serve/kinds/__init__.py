"""The kinds of models that are served, one file a kind: how the active party scores ids, and how a
passive one answers; encoders with a top model are in the room above.
"""
