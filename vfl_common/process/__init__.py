"""What every process of ours does: exit codes and signals, logs, garbage collection."""
