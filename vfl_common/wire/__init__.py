"""Bundle <-> frames. Works on buffers: no torch, no sockets."""
