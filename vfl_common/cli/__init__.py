"""The program ``vfl``: what a person runs on one machine. It starts the other two programs as processes."""
