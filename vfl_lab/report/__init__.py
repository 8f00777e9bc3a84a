"""Shows a run's folder as tables and charts."""
