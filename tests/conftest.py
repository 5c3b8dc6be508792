"""What all tests share."""

from hypothesis import HealthCheck, settings

# How long a draw or an example takes says something about the machine, which others use too.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
