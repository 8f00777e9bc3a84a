"""What a run left in its folder, as tables and charts."""
