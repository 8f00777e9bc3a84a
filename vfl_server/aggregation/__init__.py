"""The server's part in training: the mean of what the parties send it, once a round (FedHSSL, Alg. 1, lines 28-33)."""
