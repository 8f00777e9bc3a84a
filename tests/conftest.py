"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared: how long drawing an example takes says nothing about our code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
