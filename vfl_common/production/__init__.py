"""What a party knows of its models in use: which run is in production, and what was scored with
which.
"""
