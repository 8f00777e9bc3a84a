"""What a party does with its trained runs beside predicting: input drift, and a person's
deletion.
"""
