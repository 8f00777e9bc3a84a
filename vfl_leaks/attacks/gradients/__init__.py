"""Attacks that read gradients."""
