"""The common base of all methods: the context of a party, the interface of a method, and the joint
forward pass.
"""
