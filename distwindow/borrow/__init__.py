"""Priority calls, which borrow permits of coming buckets."""
