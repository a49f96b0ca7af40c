"""SAM 2 style memory: attention to stored frames and object pointers, their encoder, and the bank that holds them."""
