"""What silos hold: rows by silo, how they are split, and how an algorithm sees them."""
