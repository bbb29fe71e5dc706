"""What `ep-ops bench` runs."""
