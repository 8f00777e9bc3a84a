"""The active party's model on the embeddings: what pools them, our own top model, and those of
others.
"""
