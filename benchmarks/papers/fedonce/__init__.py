"""The tables and figures of FedOnce (Wu et al. 2022)."""
