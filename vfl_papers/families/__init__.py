"""The common part of image data sets of one family: their forms, and how they are read."""
