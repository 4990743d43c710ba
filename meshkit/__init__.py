"""What every service shares. Knows no service, no model and no torch."""
