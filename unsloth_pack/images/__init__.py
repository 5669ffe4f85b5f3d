"""Read the images of rows, count their tokens, and turn rows into documents of ids, labels and pixels."""
