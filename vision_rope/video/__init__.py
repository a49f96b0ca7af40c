"""Video: transformers of clips made from timm models of images, and SAM 2 of Ultralytics, for parity."""
