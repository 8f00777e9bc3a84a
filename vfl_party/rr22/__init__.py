"""RR22: private set intersection of two parties by oblivious transfer (Rindal and Raghuraman, CCS
2022), by the engine in SecretFlow's wheel ``spu``.

The engine of each party is a process (``engine``). It opens no port to the network: all that it
sends passes a relay in the party (``relay``) and leaves in turns of fixed size (``turns``).
"""
