"""What a run measures, where it writes it, and when it speaks up."""
