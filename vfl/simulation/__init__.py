"""A whole federation on one machine: its files, its processes, and its progress display."""

# The choices of ``vfl simulate --baseline``.
BASELINES = ("alone", "combined", "gbdt", "gbdt-alone")
