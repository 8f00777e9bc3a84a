"""Reads the formats in which research publishes data: libsvm and svmlight, IDX, MAT."""
