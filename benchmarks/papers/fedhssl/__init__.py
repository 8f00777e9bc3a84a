"""The tables and figures of FedHSSL (He et al. 2022)."""
