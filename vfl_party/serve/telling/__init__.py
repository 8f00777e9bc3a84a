"""What a serving party tells of each request: a line of its access log, and spans; never ids."""
