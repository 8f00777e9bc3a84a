"""Attacks that read embeddings."""
