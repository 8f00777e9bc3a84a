"""A whole federation on one machine: its files, its processes, and what a person sees of them."""

# What ``vfl simulate --baseline`` takes.
BASELINES = ("alone", "combined", "gbdt", "gbdt-alone")
