"""What is kept on the device, recomputed, spilled to the host, or never made at once."""
