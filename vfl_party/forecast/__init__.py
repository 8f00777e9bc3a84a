"""What a run is going to exchange, counted before anything runs."""
