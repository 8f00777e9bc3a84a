"""Forecasts the exchanged bytes and the encoders' computations of a run before it starts."""
