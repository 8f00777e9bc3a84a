"""Where a serving party's features come from: by id, prepared as in training, and of which
version; and the embeddings that the active party may keep.
"""
