"""The Open Inference Protocol, version 2: its tensors, and a port that speaks it over gRPC."""
