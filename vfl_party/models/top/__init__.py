"""The active party's models on the parties' embeddings: combinations and top models."""
