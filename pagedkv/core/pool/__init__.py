"""pool: which frames there are, which are free, which are evicted first, and which tenant is charged for them."""
