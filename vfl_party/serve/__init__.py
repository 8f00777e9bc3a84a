"""Serves a trained model: answers by id, one row at a time or many, and says who took part."""
