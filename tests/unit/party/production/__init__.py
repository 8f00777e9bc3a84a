"""What a party does with its trained runs beside predicting."""
