"""Data in silos: rows by silo, their split, and the view that an algorithm has of them."""
