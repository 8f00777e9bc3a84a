"""What image data sets of one family share: their forms, and how they are read."""
