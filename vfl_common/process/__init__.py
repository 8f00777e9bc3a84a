"""The parts that all programs share: exit codes, signals, logs, traces, garbage collection and
worker processes.
"""
