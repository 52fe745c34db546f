"""Parts of the product written a second time, plainly: what it computes must agree with them. `shared` is of every recipe."""
