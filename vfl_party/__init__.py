"""A party of a federation, active or passive: its data, its methods, its program."""
