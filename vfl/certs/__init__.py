"""A federation's certificate authority, and the commands of ``vfl certs``."""
