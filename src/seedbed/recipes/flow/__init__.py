"""Class-conditional flow-matching image transformers."""
