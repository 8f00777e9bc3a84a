"""Reads file formats of research data sets: libsvm and svmlight, IDX, MAT."""
