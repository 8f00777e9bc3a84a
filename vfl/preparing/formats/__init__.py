"""Official formats of data sets, read without trust in what the files say of themselves."""
