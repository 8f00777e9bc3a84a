"""Several runs served side by side: which of them answers, and how another takes its place."""
