"""The active party's gRPC port: what a served model answers to the Open Inference Protocol."""
