"""The way out of a party: what a phase declares, the chain that it passes, the exchange that sends
it.
"""
