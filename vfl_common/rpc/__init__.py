"""The transport: channels, streams, rendezvous. The only package beside the two ``app`` modules that imports grpc."""
