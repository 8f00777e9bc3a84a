"""What the Open Inference Protocol asks of a served model, and gets, whatever carries it."""
