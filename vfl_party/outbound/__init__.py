"""The only way out of a party: the declaration of what a phase sends, the chain of filters that it
passes, and the exchange that sends it.
"""
