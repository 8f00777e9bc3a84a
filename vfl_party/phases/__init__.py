"""The base of all methods: the context of a party, the interface of a method, the joint forward
pass.
"""
