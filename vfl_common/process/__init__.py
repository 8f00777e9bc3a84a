"""Shared by all programs: exit codes and signals, logs, traces, garbage collection, workers."""
