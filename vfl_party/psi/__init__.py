"""Private set intersection: what it computes, without a network. No torch, grpc or numpy: worker processes import it."""
