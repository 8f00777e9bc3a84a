"""The tables and figures of SS-VFL (Castiglia et al. 2022)."""
