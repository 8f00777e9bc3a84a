"""What all methods build on: the context of a party, the interface of a method, the joint forward
pass.
"""
