"""The built-in kinds of encoders, the encoders of plug-ins, and the function that builds them."""
