"""The tables and figures of MocoSFL (Li et al. 2023)."""
