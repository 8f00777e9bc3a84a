"""What was asked of a GPU once there was one: ``python -m benchmarks.gpu --help``."""
