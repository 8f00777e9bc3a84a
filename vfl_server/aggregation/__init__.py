"""The server's part in training: it averages the parties' weights once a round (FedHSSL, Alg. 1,
lines 28-33).
"""
