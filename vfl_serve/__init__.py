"""Serves trained models: scores rows by id and reports which parties took part. See README.md."""
