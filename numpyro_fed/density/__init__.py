"""One model cut into factors: the global term and one term for each silo."""
