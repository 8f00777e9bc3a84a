"""What is checked before anything leaves a party: of a run before it joins, and of what all parties
show each other when they join.
"""
