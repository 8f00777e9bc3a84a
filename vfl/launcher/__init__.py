"""Programs of ours as child processes: started afresh or forked, watched, and ended with their starter."""
