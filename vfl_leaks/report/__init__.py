"""Shows the figures of attacks as a table and a picture."""
